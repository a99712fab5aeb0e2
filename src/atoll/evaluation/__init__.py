"""How good samples are, in numbers that say what they were measured with."""
