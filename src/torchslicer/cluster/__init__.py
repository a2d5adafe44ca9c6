"""Training over processes and machines: who takes part, what is sent to whom, and what happens when one fails."""
