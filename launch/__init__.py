"""What concerns several peers at once: a whole mesh on this machine, its simulation, federation files, reports."""
