"""Named data sets and npz files: what is loaded, what is kept, and the sentence for everything that does not fit."""

from __future__ import annotations

import hashlib
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crad_p2p.data.datasets import Dataset, load_dataset
from crad_p2p.errors import DataError
from crad_p2p.federation import DataSettings, PartitionSettings

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
NOWHERE = Path("no-such-folder")


def load(dataset: str, *, seed: int = 1024, data_dir: Path = NOWHERE, download: bool = False, **fields: Any) -> Dataset:
    return load_dataset(DataSettings(dataset=dataset, **fields), seed=seed, data_dir=data_dir, download=download)


def arrays(n: int = 12, m: int = 6, *, classes: int = 3, shape: tuple[int, ...] = (5, 7, 3)) -> dict[str, np.ndarray]:
    """A valid npz content; every image is distinct, every class present."""
    rng = np.random.default_rng(7)
    return {
        "train_images": rng.integers(0, 256, (n, *shape), dtype=np.uint8),
        "train_labels": np.arange(n) % classes,
        "test_images": rng.integers(0, 256, (m, *shape), dtype=np.uint8),
        "test_labels": np.arange(m) % classes,
    }


def save(path: Path, content: dict[str, np.ndarray]) -> str:
    np.savez(path, **content)
    return f"npz:{path}"


def refusal(dataset: str, **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        load(dataset, **options)
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert not sentence.endswith(".")
    return sentence


# ---------------------------------------------------------------------------------------------------------- digits


def rows(images: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Images and labels as lexicographically sorted rows, to compare sets whatever their order."""
    table = np.column_stack([images.reshape(len(images), -1), labels])
    return table[np.lexsort(table.T[::-1])]


def test_digits_are_those_of_scikit_learn() -> None:
    from sklearn.datasets import load_digits

    official = load_digits()
    digits = load("digits")
    images = np.concatenate([digits.train.images, digits.test.images])
    labels = np.concatenate([digits.train.labels, digits.test.labels])
    assert images.shape == (1797, 1, 8, 8)
    assert images.max() == 255
    np.testing.assert_array_equal(
        rows(np.round(images / 255 * 16).astype(int), labels), rows(official.images.astype(int), official.target)
    )


def test_digits_test_part_is_stratified_and_the_same_for_every_seed() -> None:
    one, other = load("digits", seed=1), load("digits", seed=2, samples=100)
    np.testing.assert_array_equal(one.test.images, other.test.images)
    assert len(one.test) == 359
    share = np.bincount(one.test.labels) / (np.bincount(one.test.labels) + np.bincount(one.train.labels))
    assert np.abs(share - 0.2).max() < 0.01


def test_digits_import_neither_scikit_learn_nor_torch() -> None:
    code = (
        "import sys; from pathlib import Path; from crad_p2p.data.datasets import load_dataset\n"
        "from crad_p2p.federation import DataSettings\n"
        "load_dataset(DataSettings(), seed=1, data_dir=Path('.'))\n"
        "sys.exit(', '.join({'sklearn', 'torch', 'torchvision', 'medmnist'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_digits_absent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from importlib import machinery, util

    spec = machinery.ModuleSpec("sklearn", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(util, "find_spec", lambda _: spec)
    assert f"{tmp_path}/datasets/data/digits.csv.gz" in refusal("digits")
    monkeypatch.setattr(util, "find_spec", lambda _: None)
    assert "pip install scikit-learn" in refusal("digits")


# -------------------------------------------------------------------------------------------- samples, augmentation


def test_samples_keep_class_shares_and_file_order(tmp_path: Path) -> None:
    content = arrays(200, classes=1)
    content["train_labels"] = np.random.default_rng(3).permutation(np.repeat([0, 1, 2, 3], [120, 60, 18, 2]))
    source = save(tmp_path / "a.npz", content)
    kept = load(source, samples=20)
    # shares of 20 are 12, 6, 1.8, 0.2: the rarest class keeps one, at the cost of the class with the largest excess
    np.testing.assert_array_equal(np.bincount(kept.train.labels), [12, 6, 1, 1])
    assert len(load(source, samples=21).train) == 21

    everything = load(source)
    position = {image.tobytes(): i for i, image in enumerate(everything.train.images)}
    indices = [position[image.tobytes()] for image in kept.train.images]
    assert indices == sorted(set(indices))
    np.testing.assert_array_equal(everything.train.labels[indices], kept.train.labels)
    np.testing.assert_array_equal(kept.test.images, everything.test.images)

    np.testing.assert_array_equal(load(source, samples=20).train.images, kept.train.images)
    assert not np.array_equal(load(source, samples=20, seed=1).train.images, kept.train.images)


@pytest.mark.parametrize(("samples", "left"), [(1, 1), (2, 2), (3, 3), (11, 11), (12, 12), (500, 12)])
def test_samples_are_exactly_so_many(tmp_path: Path, samples: int, left: int) -> None:
    dataset = load(save(tmp_path / "a.npz", arrays()), samples=samples)
    assert len(dataset.train) == left
    assert len(np.unique(dataset.train.labels)) == min(3, samples)
    assert len(dataset.class_names) == 3


def test_augmentation_auto_is_resolved_and_a_given_one_kept(tmp_path: Path) -> None:
    source = save(tmp_path / "a.npz", arrays())
    assert load(source).augmentation == "crop"
    assert load("digits").augmentation == "crop"
    assert load("digits", augmentation="none").augmentation == "none"


# ------------------------------------------------------------------------------------------------------------- npz


@pytest.mark.parametrize(("shape", "channels"), [((5, 7), 1), ((5, 7, 1), 1), ((5, 7, 3), 3)])
@pytest.mark.parametrize("dtype", ["uint8", "int32", "uint64", "float32"])
def test_npz_shapes_and_label_types(tmp_path: Path, shape: tuple[int, ...], channels: int, dtype: str) -> None:
    content = arrays(shape=shape)
    content["train_labels"] = content["train_labels"].astype(dtype)[:, None]
    dataset = load(save(tmp_path / "a.npz", content))
    for part, name in ((dataset.train, "train"), (dataset.test, "test")):
        assert part.images.shape == (len(part), channels, *shape[:2])
        assert part.images.dtype == np.uint8
        assert part.images.flags.c_contiguous
        assert part.labels.dtype == np.int64
        np.testing.assert_array_equal(part.labels, content[f"{name}_labels"].ravel())
        original = content[f"{name}_images"].reshape(len(part), *shape[:2], channels)
        np.testing.assert_array_equal(part.images, np.moveaxis(original, -1, 1))
    assert dataset.class_names == ("0", "1", "2")
    assert dataset.mean == dataset.std == (0.5,) * channels


def test_npz_images_must_be_large_enough_to_be_halved_twice(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"'train_images' holds images of 5x3 pixels; at least 4x4 are needed"):
        load(save(tmp_path / "a.npz", arrays(shape=(5, 3))))
    assert load(save(tmp_path / "a.npz", arrays(shape=(4, 4)))).train.images.shape[2:] == (4, 4)


def test_npz_class_names_say_how_many_classes_there_are(tmp_path: Path) -> None:
    named = arrays() | {"class_names": np.array(["a", "b", "c", "never seen"])}
    assert load(save(tmp_path / "a.npz", named)).class_names == ("a", "b", "c", "never seen")
    only_in_test = arrays() | {"test_labels": np.array([0, 1, 2, 3, 4, 0])}
    assert load(save(tmp_path / "b.npz", only_in_test)).class_names == ("0", "1", "2", "3", "4")


def replaced(key: str, row: int, value: float, dtype: str = "int64") -> dict[str, np.ndarray]:
    labels = arrays()[key].astype(dtype)
    labels[row] = value
    return {key: labels}


NAMES = {"class_names": np.array(["a", "b", "c"])}
WRONG: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "above the names": (replaced("train_labels", 4, 3) | NAMES, ("'train_labels' row 4 is 3", "0 to 2")),
    "negative": (replaced("test_labels", 5, -1), ("'test_labels' row 5 is -1",)),
    "fraction": (replaced("train_labels", 2, 1.5, "float64"), ("'train_labels' row 2 is 1.5", "whole")),
    "nan": (replaced("train_labels", 3, np.nan, "float32"), ("'train_labels' row 3 is nan",)),
    "infinite": (replaced("train_labels", 3, np.inf, "float32"), ("'train_labels' row 3 is inf",)),
    "ids, not classes": (replaced("train_labels", 1, 123456), ("'train_labels' row 1 is 123456", "no class names")),
    "text labels": ({"train_labels": np.array(["x"] * 12)}, ("'train_labels'", "<U1")),
    "multi-label": ({"test_labels": np.zeros((6, 14), int)}, ("'test_labels'", "14 labels per image")),
    "labels of rank 3": ({"test_labels": np.zeros((6, 1, 1), int)}, ("'test_labels'", "[6, 1, 1]")),
    "too few labels": ({"train_labels": np.zeros(11, int)}, ("'train_labels'", "11 rows for 12 images")),
    "float images": ({"train_images": np.zeros((12, 5, 7, 3))}, ("'train_images'", "uint8", "float64")),
    "channels first": ({"train_images": np.zeros((12, 3, 5, 7), np.uint8)}, ("'train_images'", "[12, 3, 5, 7]")),
    "flat images": ({"train_images": np.zeros((12, 35), np.uint8)}, ("'train_images'", "[12, 35]")),
    "empty train": (
        {"train_images": np.zeros((0, 5, 7, 3), np.uint8), "train_labels": np.zeros(0, int)},
        ("'train_images' is empty",),
    ),
    "empty test": (
        {"test_images": np.zeros((0, 5, 7, 3), np.uint8), "test_labels": np.zeros(0, int)},
        ("'test_images' is empty",),
    ),
    "two sizes": ({"test_images": np.zeros((6, 5, 8, 3), np.uint8)}, ("[3, 5, 7]", "[3, 5, 8]")),
    "grey and colour": ({"test_images": np.zeros((6, 5, 7), np.uint8)}, ("[3, 5, 7]", "[1, 5, 7]")),
    "names are numbers": ({"class_names": np.arange(3)}, ("'class_names'", "int64")),
    "pickled labels": ({"train_labels": np.array([0, "a"] * 6, dtype=object)}, ("'train_labels' cannot be read",)),
}


@pytest.mark.parametrize("case", WRONG)
def test_npz_content_that_is_refused(tmp_path: Path, case: str) -> None:
    changes, expected = WRONG[case]
    path = tmp_path / "wrong.npz"
    sentence = refusal(save(path, arrays() | changes))
    assert sentence.startswith(f"{path}: ")
    for part in expected:
        assert part in sentence


def test_npz_missing_arrays_are_named_with_those_found(tmp_path: Path) -> None:
    content = arrays()
    del content["test_images"], content["test_labels"]
    sentence = refusal(save(tmp_path / "a.npz", content))
    assert "must hold the arrays test_images, test_labels, found train_images, train_labels" in sentence


def test_files_that_are_no_npz(tmp_path: Path) -> None:
    assert "not found" in refusal(f"npz:{tmp_path}/absent.npz")
    assert "directory" in refusal(f"npz:{tmp_path}")
    path = tmp_path / "a.npz"
    for content in (b"", b"hello, world", pickle.dumps({"train_images": 1})):
        path.write_bytes(content)
        sentence = refusal(f"npz:{path}")
        assert f"{path}: cannot be read as an .npz file" in sentence
        assert "allow_pickle" not in sentence  # numpy advises it
    with path.open("wb") as file:
        np.save(file, np.zeros(3))
    assert "single array" in refusal(f"npz:{path}")


def test_a_damaged_npz_is_refused_wherever_the_damage_is(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez_compressed(path, **arrays())
    whole = path.read_bytes()
    for length in range(0, len(whole), 97):  # cut short
        path.write_bytes(whole[:length])
        refusal(f"npz:{path}")
    original = load(save(tmp_path / "b.npz", arrays()))
    for position in range(0, len(whole), 61):  # one flipped byte: a refusal, or no harm done
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0xFF]) + whole[position + 1 :])
        try:
            dataset = load(f"npz:{path}")
        except DataError:
            continue
        np.testing.assert_array_equal(dataset.train.images, original.train.images)
        np.testing.assert_array_equal(dataset.test.labels, original.test.labels)


# ---------------------------------------------------------------------------------------------------------- groups

BY_SITE = PartitionSettings(kind="groups", by="site")
NUMBERS = [7, 7, 2, 100, 2, 7, 3, 3, 3, 100, 2, 0]  # of 12 images


@pytest.mark.parametrize(
    "values",
    [
        np.array(NUMBERS, dtype=np.uint8),
        np.array(NUMBERS)[:, None],
        np.array(NUMBERS, dtype=np.float32),
        np.array(list(map(str, NUMBERS))),
        np.array([f"patient {number}" for number in NUMBERS])[:, None],
        np.array(list(map(str, NUMBERS)), dtype="S"),
    ],
    ids=lambda values: str(values.dtype),
)
def test_groups_are_numbered_in_the_order_of_their_images_whatever_they_are_called(
    tmp_path: Path, values: np.ndarray
) -> None:
    train = load(save(tmp_path / "a.npz", arrays() | {"train_site": values}), partition=BY_SITE).train
    assert train.groups is not None
    assert train.groups.dtype == np.int64
    assert train.groups.tolist() == [0, 0, 1, 2, 1, 0, 3, 3, 3, 2, 1, 4]


def test_groups_go_with_their_images_and_are_read_only_where_they_are_used(tmp_path: Path) -> None:
    source = save(tmp_path / "a.npz", arrays(60) | {"train_site": np.arange(60) // 5})
    whole, kept = load(source, partition=BY_SITE).train, load(source, partition=BY_SITE, samples=20).train
    place = {image.tobytes(): i for i, image in enumerate(whole.images)}
    assert kept.groups is not None
    assert whole.groups is not None
    assert len(kept.groups) == 20
    assert kept.groups.tolist() == [whole.groups[place[image.tobytes()]] for image in kept.images]
    np.testing.assert_array_equal(load(source, samples=20).train.images, kept.images)
    assert load(source).train.groups is None
    assert load(source, partition=BY_SITE).test.groups is None
    unfit = save(tmp_path / "b.npz", arrays() | {"train_site": np.zeros(3)})
    assert load(unfit).train.groups is None


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (np.arange(11), "'train_site' has 11 rows for 12 images in 'train_images'; every image needs one group"),
        (np.zeros((12, 2), int), "'train_site' must be whole numbers or strings of shape [n] or [n, 1]"),
        (np.array(3), "found int64 []"),
        (np.zeros(12, bool), "found bool [12]"),
        (np.where(np.arange(12) == 4, np.nan, 1.0), "'train_site' row 4 is nan, but groups must be whole numbers"),
        (np.where(np.arange(12) == 4, np.inf, 1.0), "'train_site' row 4 is inf"),
        (np.where(np.arange(12) == 5, 0.5, 1.0), "'train_site' row 5 is 0.5"),
        (np.where(np.arange(12) == 6, "", "a"), "'train_site' row 6 is empty"),
        (np.array([1, "a"] * 6, dtype=object), "'train_site' cannot be read"),
    ],
    ids=str,
)
def test_groups_that_are_refused(tmp_path: Path, values: np.ndarray, expected: str) -> None:
    path = tmp_path / "wrong.npz"
    sentence = refusal(save(path, arrays() | {"train_site": values}), partition=BY_SITE)
    assert sentence.startswith(f"{path}: ")
    assert expected in sentence


def test_groups_that_are_not_there_are_named_with_the_arrays_that_are(tmp_path: Path) -> None:
    sentence = refusal(save(tmp_path / "a.npz", arrays() | {"train_patient": np.arange(12)}), partition=BY_SITE)
    assert "must hold the array train_site, which says of every training image to which group it belongs" in sentence
    assert "found train_images, train_labels, test_images, test_labels, train_patient; add it, or name an" in sentence


# ----------------------------------------------------------------------------------------------------------- CIFAR


def write_cifar(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> dict[str, tuple[np.ndarray, list[int]]]:
    """Tiny files in the format of CIFAR; torchvision is told their checksums, so its own check runs."""
    from torchvision.datasets import CIFAR10, CIFAR100

    source = {"cifar10": CIFAR10, "cifar100": CIFAR100}[name]
    labels_key, names_key, classes = (
        ("labels", "label_names", 10)
        if name == "cifar10"
        else (
            "fine_labels",
            "fine_label_names",
            100,
        )
    )
    base = folder / source.base_folder
    base.mkdir()
    rng = np.random.default_rng(11)

    def write(file: str, content: dict[str, Any]) -> str:
        data = pickle.dumps(content)
        (base / file).write_bytes(data)
        return hashlib.md5(data).hexdigest()

    written, lists = {}, {}
    for part in ("train_list", "test_list"):
        lists[part] = []
        for file, _ in getattr(source, part):
            data = rng.integers(0, 256, (4, 3072), dtype=np.uint8)
            labels = rng.integers(0, classes, 4).tolist()
            written[file] = data, labels
            lists[part].append([file, write(file, {"data": data, labels_key: labels})])
        monkeypatch.setattr(source, part, lists[part])
    names = [f"class {i}" for i in range(classes)]
    md5 = write(source.meta["filename"], {names_key: names})
    monkeypatch.setattr(source, "meta", {**source.meta, "md5": md5})
    return written


@pytest.mark.parametrize(("name", "classes"), [("cifar10", 10), ("cifar100", 100)])
def test_cifar_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, classes: int) -> None:
    written = write_cifar(tmp_path, monkeypatch, name)
    dataset = load(name, data_dir=tmp_path)
    *train, test = written.values()  # in the order of the batches
    np.testing.assert_array_equal(dataset.train.images, np.concatenate([d for d, _ in train]).reshape(-1, 3, 32, 32))
    np.testing.assert_array_equal(dataset.train.labels, np.concatenate([labels for _, labels in train]))
    np.testing.assert_array_equal(dataset.test.images, test[0].reshape(-1, 3, 32, 32))
    np.testing.assert_array_equal(dataset.test.labels, test[1])
    assert dataset.train.images.flags.c_contiguous
    assert dataset.class_names == tuple(f"class {i}" for i in range(classes))
    assert dataset.augmentation == "crop_hflip"
    assert dataset.mean[0] == {10: 0.4914, 100: 0.5071}[classes]
    assert dataset.std[2] == {10: 0.2616, 100: 0.2762}[classes]


def test_cifar_absent_damaged_or_not_to_be_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sentence = refusal("cifar10", data_dir=tmp_path)
    assert f"{tmp_path}/cifar-10-batches-py/data_batch_1: not found" in sentence
    assert "--download" in sentence
    assert "cifar-10-python.tar.gz" in sentence
    assert "cifar-100-python.tar.gz" in refusal("cifar100", data_dir=tmp_path)

    write_cifar(tmp_path, monkeypatch, "cifar10")
    (tmp_path / "cifar-10-batches-py" / "data_batch_3").write_bytes(b"damaged")
    assert f"{tmp_path}/cifar-10-batches-py: is damaged" in refusal("cifar10", data_dir=tmp_path)

    from torchvision.datasets import cifar

    def unreachable(*_: object, **__: object) -> None:
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(cifar, "download_and_extract_archive", unreachable)
    assert "cannot be downloaded (Network is unreachable)" in refusal("cifar10", data_dir=tmp_path, download=True)


# -------------------------------------------------------------------------------------------------------- MedMNIST


def test_medmnist_file(tmp_path: Path) -> None:
    content = arrays(shape=(28, 28, 3), classes=9) | {"val_images": np.zeros(3), "val_labels": np.zeros(3)}
    content["train_labels"] = content["train_labels"][:, None].astype(np.uint8)
    save(tmp_path / "pathmnist.npz", content)
    dataset = load("pathmnist", data_dir=tmp_path)
    assert dataset.class_names[0] == "adipose"
    assert dataset.class_names[8] == "colorectal adenocarcinoma epithelium"
    assert len(dataset.class_names) == 9
    assert (len(dataset.train), len(dataset.test)) == (12, 6)
    assert dataset.augmentation == "hvflip"
    assert dataset.mean == dataset.std == (0.5, 0.5, 0.5)

    save(tmp_path / "breastmnist.npz", arrays(shape=(28, 28)))
    assert "'train_labels' row 2 is 2" in refusal("breastmnist", data_dir=tmp_path)


def test_medmnist_absent_and_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import medmnist

    folder = tmp_path / "new"
    sentence = refusal("breastmnist", data_dir=folder)
    assert f"{folder}/breastmnist.npz: not found" in sentence
    assert "--download" in sentence
    assert medmnist.INFO["breastmnist"]["url"] in sentence

    def cut_short(*, root: str, **_: object) -> None:
        Path(root, "breastmnist.npz").write_bytes(b"PK")
        raise RuntimeError("\n    Automatic download failed!\n    1. Check\n")

    monkeypatch.setattr(medmnist, "BreastMNIST", cut_short)
    sentence = refusal("breastmnist", data_dir=folder, download=True)
    assert "cannot be downloaded (Automatic download failed!)" in sentence
    assert list(folder.iterdir()) == []

    def fetch(*, root: str, download: bool, size: int, split: str) -> None:
        assert (download, size, split) == (True, 28, "train")
        save(Path(root, "breastmnist.npz"), arrays(shape=(28, 28), classes=2))

    monkeypatch.setattr(medmnist, "BreastMNIST", fetch)
    assert load("breastmnist", data_dir=folder, download=True).class_names == ("malignant", "normal, benign")
    assert [path.name for path in folder.iterdir()] == ["breastmnist.npz"]


# ----------------------------------------------------------------------------------------------------- shared files


def shared(name: str) -> Path:
    path = SHARED / name
    if not path.is_file():
        pytest.skip(f"{path} is absent")
    return path


def test_shared_cifar10_part() -> None:
    dataset = load(f"npz:{shared('cifar10.npz')}")
    assert dataset.train.images.shape == (10000, 3, 32, 32)
    assert dataset.test.images.shape == (2000, 3, 32, 32)
    assert dataset.class_names[3] == "cat"
    np.testing.assert_array_equal(np.bincount(dataset.test.labels), [200] * 10)
    mean = dataset.train.images.mean((0, 2, 3)) / 255  # channels in the right order, near the published means
    assert np.abs(mean - [0.4914, 0.4822, 0.4465]).max() < 0.01


def test_shared_coloncells() -> None:
    dataset = load(f"npz:{shared('coloncells.npz')}", samples=1000)
    assert dataset.train.images.shape == (1000, 3, 28, 28)
    assert dataset.test.images.shape == (2085, 3, 28, 28)
    assert dataset.class_names == ("fibroblast", "inflammatory", "epithelial", "other")


def test_shared_breastmnist_reads_as_medmnist() -> None:
    dataset = load("breastmnist", data_dir=shared("breastmnist.npz").parent)
    np.testing.assert_array_equal(np.bincount(dataset.train.labels), [147, 399])
    np.testing.assert_array_equal(np.bincount(dataset.test.labels), [42, 114])
