"""The service of one peer: serves its rounds, pulls the others', and drives the learner process. Imports no torch."""

import os

# Read once, when grpc is first imported. The service starts its learner by exec; grpc's fork handlers would only add
# ways to hang.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
