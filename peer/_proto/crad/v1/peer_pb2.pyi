from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HelloRequest(_message.Message):
    __slots__ = ("peer", "software", "agreed", "protocol", "nonce")
    PEER_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_FIELD_NUMBER: _ClassVar[int]
    AGREED_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    peer: int
    software: str
    agreed: bytes
    protocol: int
    nonce: bytes
    def __init__(self, peer: _Optional[int] = ..., software: _Optional[str] = ..., agreed: _Optional[bytes] = ..., protocol: _Optional[int] = ..., nonce: _Optional[bytes] = ...) -> None: ...

class HelloReply(_message.Message):
    __slots__ = ("peer", "software", "agreed", "seen_round", "seen_sha256", "seen_manifest", "remembers", "protocol", "certificate", "proof", "unix_time")
    PEER_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_FIELD_NUMBER: _ClassVar[int]
    AGREED_FIELD_NUMBER: _ClassVar[int]
    SEEN_ROUND_FIELD_NUMBER: _ClassVar[int]
    SEEN_SHA256_FIELD_NUMBER: _ClassVar[int]
    SEEN_MANIFEST_FIELD_NUMBER: _ClassVar[int]
    REMEMBERS_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    UNIX_TIME_FIELD_NUMBER: _ClassVar[int]
    peer: int
    software: str
    agreed: bytes
    seen_round: int
    seen_sha256: str
    seen_manifest: bytes
    remembers: bool
    protocol: int
    certificate: bytes
    proof: bytes
    unix_time: float
    def __init__(self, peer: _Optional[int] = ..., software: _Optional[str] = ..., agreed: _Optional[bytes] = ..., seen_round: _Optional[int] = ..., seen_sha256: _Optional[str] = ..., seen_manifest: _Optional[bytes] = ..., remembers: bool = ..., protocol: _Optional[int] = ..., certificate: _Optional[bytes] = ..., proof: _Optional[bytes] = ..., unix_time: _Optional[float] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("progress",)
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    progress: bool
    def __init__(self, progress: bool = ...) -> None: ...

class PeerState(_message.Message):
    __slots__ = ("round", "collected", "data", "leaving", "manifest", "manifest_sha256", "busy_seconds", "phase", "step", "steps", "explanation", "validation_accuracy", "global_accuracy")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    COLLECTED_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_SHA256_FIELD_NUMBER: _ClassVar[int]
    BUSY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    EXPLANATION_FIELD_NUMBER: _ClassVar[int]
    VALIDATION_ACCURACY_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_ACCURACY_FIELD_NUMBER: _ClassVar[int]
    round: int
    collected: int
    data: Data
    leaving: bool
    manifest: bytes
    manifest_sha256: str
    busy_seconds: float
    phase: str
    step: int
    steps: int
    explanation: str
    validation_accuracy: float
    global_accuracy: float
    def __init__(self, round: _Optional[int] = ..., collected: _Optional[int] = ..., data: _Optional[_Union[Data, _Mapping]] = ..., leaving: bool = ..., manifest: _Optional[bytes] = ..., manifest_sha256: _Optional[str] = ..., busy_seconds: _Optional[float] = ..., phase: _Optional[str] = ..., step: _Optional[int] = ..., steps: _Optional[int] = ..., explanation: _Optional[str] = ..., validation_accuracy: _Optional[float] = ..., global_accuracy: _Optional[float] = ...) -> None: ...

class Data(_message.Message):
    __slots__ = ("class_names", "image_shape", "partition_digest", "test_digest")
    CLASS_NAMES_FIELD_NUMBER: _ClassVar[int]
    IMAGE_SHAPE_FIELD_NUMBER: _ClassVar[int]
    PARTITION_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TEST_DIGEST_FIELD_NUMBER: _ClassVar[int]
    class_names: _containers.RepeatedScalarFieldContainer[str]
    image_shape: _containers.RepeatedScalarFieldContainer[int]
    partition_digest: str
    test_digest: str
    def __init__(self, class_names: _Optional[_Iterable[str]] = ..., image_shape: _Optional[_Iterable[int]] = ..., partition_digest: _Optional[str] = ..., test_digest: _Optional[str] = ...) -> None: ...

class GetManifestRequest(_message.Message):
    __slots__ = ("peer", "round")
    PEER_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    peer: int
    round: int
    def __init__(self, peer: _Optional[int] = ..., round: _Optional[int] = ...) -> None: ...

class GetManifestReply(_message.Message):
    __slots__ = ("document", "manifest_sha256")
    DOCUMENT_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_SHA256_FIELD_NUMBER: _ClassVar[int]
    document: bytes
    manifest_sha256: str
    def __init__(self, document: _Optional[bytes] = ..., manifest_sha256: _Optional[str] = ...) -> None: ...

class GetSnapshotRequest(_message.Message):
    __slots__ = ("peer", "round", "sha256", "offset", "recheck")
    PEER_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    RECHECK_FIELD_NUMBER: _ClassVar[int]
    peer: int
    round: int
    sha256: str
    offset: int
    recheck: bool
    def __init__(self, peer: _Optional[int] = ..., round: _Optional[int] = ..., sha256: _Optional[str] = ..., offset: _Optional[int] = ..., recheck: bool = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("offset", "data")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    offset: int
    data: bytes
    def __init__(self, offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class RefuseRequest(_message.Message):
    __slots__ = ("round", "sha256", "reason")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    round: int
    sha256: str
    reason: str
    def __init__(self, round: _Optional[int] = ..., sha256: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class RefuseReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
