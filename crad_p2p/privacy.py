"""Laplace noise on the class counts that a peer publishes. Torch-free; docs/privacy.md says it in plain words.

With ``privacy.count_epsilon`` a peer adds to each class count n its own draw of Laplace noise of scale 1/epsilon,
rounded to an integer, once for the whole run, and clamps the sum at zero. Everybody, itself included, works with these
counts and never sees the true ones: filter, weights, validation accuracy, choice of the best round, history.jsonl,
summary.json. What is published per class:

    n' = max(0, n + round(Laplace(1/epsilon)))    the same in every round
    h' = round(h/n * n'), and 0 where n = 0       so that h'/n' is h/n within 1/(2n')
    p' = n'                                       says nothing

**Why p' = n'.** The true p sum to the number of validation images; and the better a model, the closer p is to n, up to
equality, so p rescaled like h would publish the true class shares beside the noised counts. Noise of its own would cost
epsilon again in every round. n' tells nothing new, and looks like the statistics of a model that predicts no class too
often: h' <= p', and both p' and n' have the same sum.

**What epsilon covers.** Adding or taking away one validation image changes one count by one (sensitivity 1), so the
vector of n', taken by itself, is epsilon-differentially private for a single image, however many rounds it is reused
in. k images of one patient get k * epsilon, and so does one image in k runs: each run is another release.

**What it does not cover.** h', the accuracies and the model are functions of the true data without any noise. h' even
tells of the true n: it takes at most n + 1 values, so who sees h' of many rounds can guess n where n' > n, and that
n = 0 where h' stays 0. The noise hides the counts from whoever looks at the counts; it is no guarantee for all that a
peer publishes.

**The draw** is a function of (secret, federation digest, peer id, class) and of nothing else. The noise is an integer
before it meets n, and integers add exactly, so the low bits of floating-point numbers, by which a textbook Laplace
sampler betrays its input (Mironov 2012), are never published.
"""

from __future__ import annotations

import hmac
import math
import secrets
import stat
from collections.abc import Sequence
from pathlib import Path

from crad_p2p.durable import write_file
from crad_p2p.errors import ConfigurationError
from crad_p2p.manifest import COUNT_LIMIT, ClassStatistics

#: The secret's name in a state directory.
KEY_FILE = "count-noise.key"
KEY_BYTES = 32

_UNIFORM_BITS = 255  # what a digest of 256 bits leaves beside the sign; the noise goes as far as 176 times its scale


def noise(key: bytes, epsilon: float, run: str, peer: int, label: int) -> int:
    """What is added to the count of one class: Laplace noise of scale 1/epsilon, rounded to an integer.

    Args:
        key: the peer's secret.
        epsilon: above zero.
        run: the federation's digest.
        peer: the peer's id.
        label: the class, from 0 on.
    """
    digest = hmac.digest(key, f"count noise/{run}/{peer}/{label}".encode(), "sha256")
    number = int.from_bytes(digest, "big")
    uniform = ((number >> 1) + 1) / (1 << _UNIFORM_BITS)  # in (0, 1]
    magnitude = round(min(-math.log(uniform) / epsilon, float(COUNT_LIMIT)))
    return magnitude if number & 1 else -magnitude


def noised_counts(counts: Sequence[int], key: bytes, epsilon: float, run: str, peer: int) -> tuple[int, ...]:
    """n' of every class, from n of every class; the other arguments are those of :func:`noise`."""
    noised = (n + noise(key, epsilon, run, peer, label) for label, n in enumerate(counts))
    return tuple(min(max(n, 0), COUNT_LIMIT - 1) for n in noised)  # the upper end is the manifest's


def publishable(measured: ClassStatistics, counts: Sequence[int]) -> ClassStatistics:
    """What is published instead of the statistics that were measured.

    Args:
        measured: true n, h and p.
        counts: n' of every class.

    Raises:
        ValueError: ``counts`` are of another number of classes.
    """
    triples = zip(measured.counts, measured.hits, counts, strict=True)
    # Integers throughout: h/n * n' as floats could end above n', or on the wrong side of a half.
    hits = tuple((2 * h * noised + n) // (2 * n) if n else 0 for n, h, noised in triples)
    return ClassStatistics(counts=tuple(counts), hits=hits, predicted=tuple(counts))


def describe_noise(epsilon: float, *, is_own: bool) -> str:
    """That there is noise on the counts, and what it does not do, for a log or a check.

    Args:
        is_own: each site has images of its own.
    """
    said = f"noise of scale 1/{epsilon:g} is on the class counts that are published (privacy.count_epsilon)"
    if is_own:
        return f"{said}; hits, accuracies and models have none (docs/privacy.md)"
    return (
        f"{said}, but while all peers cut their shards out of one common data set everybody can compute the true ones"
    )


def create_key(path: Path) -> None:
    """Draw a secret and make it durable under this name, whole or not at all, readable for its owner only.

    Raises:
        FileExistsError: something has this name already, and stays as it is.
        OSError: it could not be written.
    """
    write_file(path, secrets.token_bytes(KEY_BYTES), 0o600, may_replace=False)


def load_key(path: Path) -> bytes:
    """Read a secret.

    Raises:
        ConfigurationError: it is no file of 32 bytes, or others may read it.
        OSError: it is not there, or cannot be read.
    """
    found = path.stat()
    if not stat.S_ISREG(found.st_mode) or found.st_size != KEY_BYTES:
        what = f"has {found.st_size} bytes" if stat.S_ISREG(found.st_mode) else "is no file"
        raise ConfigurationError(
            f"{path} {what}, and must be a file of {KEY_BYTES} random bytes: put back a copy, or remove it; counts "
            f"that this peer has published stay as they are, and new ones are drawn only if it has published none"
        )
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o077:
        raise ConfigurationError(
            f"{path} has mode {mode:04o}, and must be for its owner alone (0600), since with it the noise can be taken "
            f"off the published counts: run 'chmod 600 {path}'"
        )
    return path.read_bytes()
