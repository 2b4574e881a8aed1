"""The images of a federation's peers, as its file and their hosts say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from crad_p2p.data.own.cache import Progress
from crad_p2p.data.own.listing import Classes
from crad_p2p.data.own.rendering import Rendering
from crad_p2p.data.own.site import Cache, CommonTest, Site, list_place, load_site, load_test
from crad_p2p.data.shards import Shard
from crad_p2p.federation import Federation


def rendering_of(federation: Federation) -> Rendering:
    """How images are made alike in this federation."""
    image = federation.data.image_settings
    return Rendering(image.size, image.channels, image.window)


def common_test_of(federation: Federation, cache: Cache, progress: Progress = lambda *_: None) -> CommonTest | None:
    """The common test set; None if there is none.

    Raises:
        DataError: it is not all there.
    """
    data = federation.data
    if data.test is None:
        return None
    return load_test(data.test, data.classes or (), rendering_of(federation), cache, progress)


def site_of(
    federation: Federation,
    peer: int,
    cache: Cache,
    *,
    place: str | None = None,
    test: CommonTest | None,
    progress: Progress = lambda *_: None,
) -> Site:
    """A peer's own images.

    Args:
        place: where they are, if its host says so; else where the federation file does.

    Raises:
        ConfigurationError: nobody says where.
        DataError: they cannot be used.
    """
    data = federation.data
    return load_site(
        federation.place_of(peer, place),
        data.classes or (),
        rendering_of(federation),
        holdout=data.holdout,
        augmentation=data.augmentation,
        seed=federation.seed,
        peer=peer,
        cache=cache,
        test=test,
        progress=progress,
    )


def look_at_places(federation: Federation) -> None:
    """See that every peer's images, and the common test set, are there and of the federation's classes. None is read.

    Raises:
        ConfigurationError: of some peer nobody says where its images are.
        DataError: something does not fit.
    """
    places = [federation.place_of(peer) for peer in federation.ids]
    if federation.data.test is not None:
        places.append(federation.data.test)
    classes = Classes(federation.data.classes or ())
    for place in places:
        list_place(place, classes)


def all_sites(federation: Federation, folder: Path, say: Callable[[str], None]) -> dict[int, Shard]:
    """The images of all peers of a federation on this machine.

    Args:
        folder: peer i has its cache and its summary in FOLDER/i.
        say: called with a sentence for each peer.

    Raises:
        ConfigurationError: of some peer nobody says where its images are.
        DataError: some cannot be used.
    """
    look_at_places(federation)
    test = common_test_of(federation, Cache(folder / "test"))
    shards = {}
    for peer in federation.ids:
        site = site_of(federation, peer, Cache(folder / str(peer)), test=test)
        site.summary.write(folder / str(peer))
        say(f"peer {peer}: {site.summary.in_short()}")
        for sentence in site.summary.warnings():
            say(f"peer {peer}: {sentence}")
        shards[peer] = Shard(site.dataset, site.split)
    return shards
