"""What a model is: units, the values between them, and the ways to find them."""
