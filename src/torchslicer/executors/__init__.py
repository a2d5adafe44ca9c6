"""Executors turn "run this step" into work for their ranks."""
