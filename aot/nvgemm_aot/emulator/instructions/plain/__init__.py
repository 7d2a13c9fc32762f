"""Instructions that move and order values without asynchronous units."""
