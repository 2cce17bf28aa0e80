"""How a rank that fails, hangs or disappears is noticed and reported."""
