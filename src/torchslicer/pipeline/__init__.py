"""One rank: stages, what crosses their boundaries, and the loop that runs a schedule."""
