"""Many processes, one run: who takes part, what they may do, and what is sent to them."""
