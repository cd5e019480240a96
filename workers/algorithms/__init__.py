"""Algorithms; one file each, holding both halves: advantages (numpy) and the loss (torch)."""
