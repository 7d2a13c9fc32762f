"""Opening large bundles and looking a problem up, in fresh processes."""
