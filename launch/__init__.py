"""What concerns several peers at once: a whole mesh on this machine, its simulation, federation files, reports."""

import peer  # noqa: F401  # what gRPC reads from the environment has to be there before its first import
