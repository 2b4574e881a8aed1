"""Names to methods."""

from __future__ import annotations

from collections.abc import Sequence

from crad_p2p.architectures import layout_of
from crad_p2p.errors import ConfigurationError
from crad_p2p.federation import BUNDLE, IMAGES, MODEL_DIGEST, PREDICTIONS, Federation
from crad_p2p.methods.backbone import Backbone
from crad_p2p.methods.dfml import Dfml
from crad_p2p.methods.fedgd import FedGd
from crad_p2p.methods.fedmd import FedMd
from crad_p2p.methods.fedmkd import FedMkd
from crad_p2p.methods.interface import Method, Student
from crad_p2p.methods.local import Local
from crad_p2p.methods.msfkd import Msfkd
from crad_p2p.snapshot import MAX_HEADER_BYTES, Layout, TensorSpec, header_bytes
from crad_p2p.together import bundle_of
from crad_p2p.transfer import TRANSFER_DIGEST

#: A sha256.
_DIGEST = TensorSpec("U8", (32,))

#: Those with a class of their own; the others are targets of the backbone.
_CLASSES: dict[str, type[Method]] = {
    "fedmkd": FedMkd,
    "dfml": Dfml,
    "fedmd": FedMd,
    "msfkd": Msfkd,
    "fedgd": FedGd,
    "local": Local,
}


def build_method(federation: Federation, student: Student) -> Method:
    """The method that a federation agreed on, for one of its peers."""
    return _CLASSES.get(federation.method.name, Backbone)(federation, student)


def layouts_of(federation: Federation, *, classes: int, image_shape: Sequence[int]) -> dict[str, Layout]:
    """Tensor layouts of all that is published, by the keys of :meth:`Federation.published_by`, and of every
    architecture.

    Args:
        image_shape: channels, height, width.

    Raises:
        ConfigurationError: there are too many peers for a file with the models of all.
    """
    layouts = {
        arch: layout_of(arch, classes=classes, channels=image_shape[0])
        for arch in {peer.arch for peer in federation.peers}
    }
    if federation.method.traits.publishes_predictions:
        layouts[PREDICTIONS] = {PREDICTIONS: TensorSpec("F32", (federation.transfer_size, classes))}
    if federation.method.traits.makes_transfer_set:
        layouts[PREDICTIONS] |= {TRANSFER_DIGEST: _DIGEST}
        layouts[MODEL_DIGEST] = {MODEL_DIGEST: _DIGEST}
        for peer in federation.ids:
            images = TensorSpec("U8", (federation.images_of(peer), *image_shape))
            layouts[federation.images_key(peer)] = {IMAGES: images, MODEL_DIGEST: _DIGEST}
    if federation.method.aggregates:
        layouts[MODEL_DIGEST] = {MODEL_DIGEST: _DIGEST}
        layouts[BUNDLE] = bundle_of({peer: layouts[federation.peer(peer).arch] for peer in federation.ids})
        layouts[BUNDLE] |= layouts[MODEL_DIGEST]
        if (length := header_bytes(layouts[BUNDLE])) > MAX_HEADER_BYTES:
            raise ConfigurationError(
                f"method.dfml.mode: aggregator with {len(federation.peers)} peers, whose models have "
                f"{len(layouts[BUNDLE])} tensors together: a file of all has a header of {length} bytes, and at most "
                f"{MAX_HEADER_BYTES} are taken; use fewer peers, or mode symmetric"
            )
    return layouts
