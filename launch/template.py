"""The commented peers.yaml of ``crad-mesh init``."""

from __future__ import annotations

from collections.abc import Sequence

import yaml

from crad_p2p.federation import POOL

_HEAD = """\
# A federation: everything its peers must agree on. Every host gets this same file, apart from addresses, which may
# differ where sites see each other under different names. Values are the defaults, which are the paper's where it
# names one.

federation: {name}            # lower-case letters, digits, hyphens
seed: 1024                    # of every random draw
rounds: {rounds}                   # each is one local epoch
# participation: {active:<2}           # peers that take part in a round, drawn anew each: from 2; without it, all do

data:
{data}
  augmentation: auto          # auto, none, crop, crop_hflip, hvflip

method:
  name: crad                  # crad, stage1, uniform, uncertainty, local; other weights in CRAD's place: acc, sup, sm,
                              # lcb, ce, inv_sigma, precision; fedmkd, dfml, fedmd, msfkd, fedgd (docs/methods.md)
  temperature: 3.0            # T
  distillation_weight: 0.7    # lambda: share of the loss that comes from the teachers
  min_support: 2              # validation samples a teacher needs to count for a class
  empty_class: uniform        # for a class without any such teacher: uniform, zero, student
  warmup_rounds: 0            # first rounds that learn from own labels only
  # fedmkd: {{memory_weight: half}}    # fedmkd alone: share of the own last model, 1/2 or (uniform) 1/(teachers + 1)
  # dfml: {{mode: symmetric, alpha_min: 0.0, alpha_max: 0.8, period: 10, temperature: 1.0}}     # dfml alone: cycle of
                              # the others' weight; mode aggregator: one peer a round trains the models of all
  # msfkd: {{keep_quantile: 0.5, require_plurality: true}}     # msfkd alone: whose predictions count
  # fedgd: {{first: 20, every: 50, images: 500, steps: 100, weight: 1.0}}     # fedgd alone: when which images are made

training:
  batch_size: 64
  optimizer: sgd
  learning_rate: 0.01
  momentum: 0.9
  weight_decay: 0.0005
  clip_norm: 10.0
  evaluate_every: 10          # rounds between evaluations on the common test set

privacy:
  count_epsilon: null         # class counts get Laplace noise of scale 1/count_epsilon; null publishes the true ones.
{noise}

barrier:
  policy: all                 # a round waits for every peer; with quorum, only until each one's deadline
  # min: {least:<2}                   # quorum: peers without which no round opens, by default just over half
  # max_staleness: 2          # quorum: rounds by which the model of a missing peer may be old to teach
  # grace: 15                 # quorum: seconds added to what is known of a peer's speed

# id, address as the others reach it, and architecture: resnet18, resnet18-half, cnn6, each with a width as in
# cnn6@0.25. Without arch, peer i takes number i mod 3 of these.
{places}peers:
"""

_COMMON = """\
  dataset: {dataset}             # digits, cifar10, cifar100, pathmnist and other MedMNIST names, or npz:PATH
  partition:
{partition}
    # kind: own               # instead of all this: every site brings its own images, and there is no dataset;
                              # 'crad-mesh init --classes A,B,…' writes such a file (docs/own-images.md)
  holdout: 0.2                # of each shard: half to validate, half to test
  samples: null               # at most so many training images in all; null takes every one
  # transfer_samples: 500     # images of all classes alike that are cut out before the shards, without their labels,
                              # and belong to nobody: fedmd and msfkd need them; the same shards for every method"""

_OWN = """\
  partition:
    kind: own                 # every site brings its own images (docs/own-images.md); where they are, its host says:
                              # crad-peer --data folder:PATH, csv:PATH or npz:PATH
  # All classes of the federation. A site's directories or labels have these very names, and it may lack some; their
  # order is that of the models' outputs, and nothing else.
  classes: {classes}
  image:
    size: 28                  # side in pixels: pictures of any size are scaled to this square, without their aspect
    channels: 3               # 3: grey is repeated; 1: colour becomes luma
    window: null              # values of 16-bit pictures that become black and white, such as [0, 4095]; null takes
                              # all that their depth can hold. 8-bit pictures stay as they are
  # test: folder:common-test  # a common test set, alike on every site: folder, csv or npz; without it there is no
                              # accuracy but that on each site's own images
  holdout: 0.2                # of a site's images, if it has not divided them itself: half to validate, half to test"""

_NOISE_COMMON = """\
                              # While the data are one common set everybody can compute the true ones all the same"""
_NOISE_OWN = """\
                              # It makes neither models nor accuracies private (docs/privacy.md)"""
_PLACES = """\
# With all peers on one machine ('up', 'simulate') an entry says where the images are, as in
# {{id: 0, address: "127.0.0.1:7400", arch: cnn6, data: "folder:site-0"}}; a relative path is taken from this file.
"""


_DIRICHLET = """\
    kind: dirichlet           # cuts the common training set into one shard a peer: every host must have the same
                              # whole data set, of which its peer trains on its shard
    alpha: 0.3                # smaller is more uneven
    min_size: 10              # fewest images of a shard
    balance: true             # a peer with its even share gets no more of later classes
    # kind: groups            # instead, of an npz file: shards of whole groups, such as patients; without alpha
    # by: patient             # and balance. The array train_patient has the group of every training image"""

_GROUPS = """\
    kind: groups              # cuts the common training set into shards of whole groups, one shard a peer: every
                              # host must have the same whole data set, of which its peer trains on its shard
    by: {value:<21} # the array train_{by} of the file has the group of every training image
    min_size: 10              # fewest images of a shard"""


def render(count: int, dataset: str, by: str | None = None, classes: Sequence[str] | None = None) -> str:
    """The text of the file.

    Args:
        by: what makes groups, for shards of whole groups; None for a Dirichlet draw.
        classes: for sites with images of their own, the names of all classes; ``dataset`` plays no part then.
    """
    least, active = count // 2 + 1, max(2, count // 10)
    head = _HEAD.format(
        name="my-federation",
        rounds=300,
        least=least,
        active=active,
        data=_common(dataset, by) if classes is None else _OWN.format(classes=_list(classes)),
        noise=_NOISE_COMMON if classes is None else _NOISE_OWN,
        places="" if classes is None else _PLACES.format(),
    )
    entries = (f'  - {{id: {i}, address: "127.0.0.1:{7400 + i}", arch: {POOL[i % len(POOL)]}}}\n' for i in range(count))
    return head + "".join(entries)


def _common(dataset: str, by: str | None) -> str:
    partition = _DIRICHLET if by is None else _GROUPS.format(by=by, value=_scalar(by))
    return _COMMON.format(dataset=_scalar(dataset), partition=partition)


def _list(names: Sequence[str]) -> str:
    return yaml.safe_dump([*names], default_flow_style=True, allow_unicode=True, width=10**9).strip()


def _scalar(text: str) -> str:
    return yaml.safe_dump(text).splitlines()[0]
