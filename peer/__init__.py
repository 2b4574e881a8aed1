"""The service of one peer: serves its rounds, pulls the others', and drives the learner process. Imports no torch."""

import os

# Read once, when grpc is first imported. The service starts its learner by exec; grpc's fork handlers would only add
# ways to hang.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
# These are for TLS 1.2, which gRPC would speak too. The one that is left needs a key agreed beforehand, and there is
# none: so no handshake of 1.2 comes about. TLS 1.3 has its own.
os.environ["GRPC_SSL_CIPHER_SUITES"] = "ECDHE-PSK-CHACHA20-POLY1305"
