"""The manifest: what a peer says of one published round. Torch-free; the service reads and writes it."""

from __future__ import annotations

import json
from typing import Annotated, Any, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from crad_p2p.foreign import printable, unique_keys

#: A manifest of 1,000 classes and 1,000 consumed snapshots stays below this many bytes.
MAX_BYTES = 256 * 1024

#: Every count is below.
COUNT_LIMIT = 2**40
#: No cross-entropy is above, in nats: a model that is worse than e^-1000 is simply wrong.
CROSS_ENTROPY_LIMIT = 1000.0

Count = Annotated[int, Field(ge=0, lt=COUNT_LIMIT)]
Nats = Annotated[float, Field(ge=0, le=CROSS_ENTROPY_LIMIT)]
PeerId = Annotated[int, Field(ge=0, lt=2**16)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class ClassStatistics(_Strict):
    """Per class c: n validation samples of c, h of them classified correctly, p predictions of c.

    ``cross_entropy`` is the mean of -log p(c|x) over the samples of c, and the limit where there are none. One method
    publishes it (``crad_p2p.methods.table4``); for all others it is None, and then it is in no document.

    In a federation with noise on the counts, those that are published are not those that were measured
    (:mod:`crad_p2p.privacy`).
    """

    counts: tuple[Count, ...]
    hits: tuple[Count, ...]
    predicted: tuple[Count, ...]
    cross_entropy: tuple[Nats, ...] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not len(self.counts) == len(self.hits) == len(self.predicted):
            raise ValueError("counts, hits and predicted must have one number a class each")
        if any(h > n for h, n in zip(self.hits, self.counts, strict=True)):
            raise ValueError("hits of a class must not be above its count")
        if self.cross_entropy is not None and len(self.cross_entropy) != len(self.counts):
            raise ValueError("cross_entropy must have one number a class, as counts")
        return self

    @model_serializer(mode="wrap")
    def _without_what_is_not_there(self, serialise: SerializerFunctionWrapHandler) -> dict[str, Any]:
        tree: dict[str, Any] = serialise(self)
        if self.cross_entropy is None:
            tree.pop("cross_entropy", None)
        return tree

    @property
    def accuracy(self) -> float | None:
        """Share of the validation samples classified correctly; None without a sample."""
        total = sum(self.counts)
        return sum(self.hits) / total if total else None


class Consumed(_Strict):
    """One snapshot that taught this round."""

    peer: PeerId
    round: int = Field(ge=0, lt=2**31)
    sha256: Digest


class Signature(_Strict):
    """Who vouches for a manifest: certificate (DER) and signature over :meth:`Manifest.signed_bytes`, both base64."""

    certificate: str = Field(max_length=12_000)
    value: str = Field(max_length=200)


class Manifest(_Strict):
    """What is announced with a snapshot.

    ``run`` is the federation's digest. ``model_round`` is the round in which the weights were trained: ``round``, but
    for a peer that comes back and publishes its last model again as the round of the mesh. Of the peers that may teach
    this round, ``consumed`` taught (with an older snapshot, if its round is before ``round`` - 1), ``missing`` had none
    in time, and the snapshots of ``quarantined`` were refused. ``signature`` is None only without TLS.
    """

    run: Digest
    peer: PeerId
    round: int = Field(ge=0, lt=2**31)
    arch: str = Field(max_length=100)
    size: int = Field(gt=0, lt=2**50, description="bytes of the snapshot file")
    sha256: Digest
    statistics: ClassStatistics
    consumed: tuple[Consumed, ...]
    model_round: int = Field(ge=0, lt=2**31)
    missing: tuple[PeerId, ...]
    quarantined: tuple[PeerId, ...]
    signature: Signature | None = None

    @model_validator(mode="after")
    def _not_from_the_future(self) -> Self:
        if self.model_round > self.round:
            raise ValueError(f"model_round {self.model_round} is after round {self.round}")
        return self

    def to_bytes(self) -> bytes:
        """The manifest as it is stored and sent: JSON in UTF-8, fields in the order above."""
        return self.model_dump_json().encode()

    def signed_bytes(self) -> bytes:
        """What a signature covers: the same JSON without the signature."""
        return self.model_dump_json(exclude={"signature"}).encode()

    @classmethod
    def from_bytes(cls, document: bytes) -> Manifest:
        """Parse and validate what another peer sent.

        Raises:
            ValueError: too large, not JSON, or a field that is missing, unknown or out of range.
        """
        if len(document) > MAX_BYTES:
            raise ValueError(f"manifest of {len(document)} bytes; at most {MAX_BYTES} are allowed")
        try:
            json.loads(document, object_pairs_hook=unique_keys)  # pydantic would let the last of two equal keys win
            return cls.model_validate_json(document)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            field = printable(".".join(map(str, first["loc"])))
            raise ValueError(f"manifest field {field}: {printable(first['msg'])}") from None
        except (ValueError, RecursionError) as error:
            raise ValueError(f"manifest is not valid JSON: {printable(str(error))}") from None
