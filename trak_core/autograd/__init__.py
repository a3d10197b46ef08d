"""Find every sample's gradients, use by use of a parameter, in one backward pass."""
