"""Indexes made of several `Index` objects: installed and cached bundles, or rows of large ones."""
