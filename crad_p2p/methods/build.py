"""Names to methods."""

from __future__ import annotations

from crad_p2p.architectures import layout_of
from crad_p2p.federation import PREDICTIONS, Federation
from crad_p2p.methods.backbone import Backbone
from crad_p2p.methods.dfml import Dfml
from crad_p2p.methods.fedmd import FedMd
from crad_p2p.methods.fedmkd import FedMkd
from crad_p2p.methods.interface import Method, Student
from crad_p2p.methods.local import Local
from crad_p2p.methods.msfkd import Msfkd
from crad_p2p.snapshot import Layout, TensorSpec

#: Those with a class of their own; the others are targets of the backbone.
_CLASSES: dict[str, type[Method]] = {"fedmkd": FedMkd, "dfml": Dfml, "fedmd": FedMd, "msfkd": Msfkd, "local": Local}


def build_method(federation: Federation, student: Student) -> Method:
    """The method that a federation agreed on, for one of its peers."""
    return _CLASSES.get(federation.method.name, Backbone)(federation, student)


def layouts_of(federation: Federation, *, classes: int, channels: int) -> dict[str, Layout]:
    """Tensor layouts of all that is published, by the keys of :meth:`Federation.published_by`, and of every
    architecture.
    """
    layouts = {
        arch: layout_of(arch, classes=classes, channels=channels) for arch in {peer.arch for peer in federation.peers}
    }
    if federation.method.traits.publishes_predictions:
        layouts[PREDICTIONS] = {PREDICTIONS: TensorSpec("F32", (federation.data.transfer_samples or 0, classes))}
    return layouts
