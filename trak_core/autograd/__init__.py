"""One backward pass for all samples: what every use of a parameter gives to each one's gradient."""
