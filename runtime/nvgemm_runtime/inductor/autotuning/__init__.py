"""Offers bundled kernels as choices under max-autotune, and times them."""
