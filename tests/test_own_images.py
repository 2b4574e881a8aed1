"""A site's own images: what is found at a place, what is refused, how it is divided, kept and summed up."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pictures import HEIGHT, WIDTH, pixels, save, tiff16

from crad_p2p.data.own import cache as caching
from crad_p2p.data.own.cache import decode
from crad_p2p.data.own.listing import Classes, Listing
from crad_p2p.data.own.parts import divide
from crad_p2p.data.own.rendering import Rendering
from crad_p2p.data.own.site import Cache, CommonTest, Site, list_place, load_site, load_test
from crad_p2p.data.place import absolute_place, check_place
from crad_p2p.durable import replacing
from crad_p2p.errors import DataError

CLASSES = ("adenoma", "normal", "polyp")
SIZE = Rendering(8, 3)


def site(folder: Path, **counts: int) -> str:
    """A directory of so many images of each class, all different; its place."""
    for number, (name, count) in enumerate(counts.items()):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            save(folder / name / f"{i:03d}.png", pixels(1000 * number + i))
    return f"folder:{folder}"


def found(place: str) -> Listing:
    return list_place(place, Classes(CLASSES))


def load(place: str, folder: Path, *, rendering: Rendering = SIZE, **options: Any) -> Site:
    """One site; its cache is beside its images."""
    common = {"holdout": 0.2, "augmentation": "auto", "seed": 7, "peer": 0, "cache": Cache(folder / ".cache")}
    return load_site(place, CLASSES, rendering, **{**common, **options})


def refusal(place: str) -> str:
    with pytest.raises(DataError) as caught:
        found(place)
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert not sentence.endswith(".")
    return sentence


def names(listing: Listing) -> dict[str, str]:
    return {item.name: CLASSES[item.label] for item in listing.items}


def refused(listing: Listing | Site) -> dict[str, str]:
    entries = listing.refused if isinstance(listing, Listing) else listing.summary.refused
    return {each.name: each.reason for each in entries}


# --- places -----------------------------------------------------------------------------------------------------------


def test_a_place_has_a_kind_and_a_path(tmp_path: Path) -> None:
    assert absolute_place("folder:a b/ü", tmp_path) == f"folder:{tmp_path}/a b/ü"
    assert absolute_place("csv:/a:b.csv", tmp_path) == "csv:/a:b.csv"
    for wrong, meant in (("images", "folder:images"), ("a/b.csv", "csv:a/b.csv"), ("c.NPZ", "npz:c.NPZ")):
        with pytest.raises(ValueError, match=f"did you mean '{meant}'"):
            check_place(wrong)
    for wrong in ("folder:", "dir:x", ""):
        with pytest.raises(ValueError, match="allowed are folder:PATH, csv:PATH, npz:PATH"):
            check_place(wrong)


# --- folders ----------------------------------------------------------------------------------------------------------


def test_one_directory_a_class_at_any_depth(tmp_path: Path) -> None:
    place = site(tmp_path, normal=2, adenoma=1)
    save(tmp_path / "adenoma" / "2023" / "Mai" / "x.png", pixels(1))
    assert names(found(place)) == {
        "adenoma/000.png": "adenoma",
        "adenoma/2023/Mai/x.png": "adenoma",
        "normal/000.png": "normal",
        "normal/001.png": "normal",
    }


def test_names_with_spaces_and_umlauts_however_they_are_spelled(tmp_path: Path) -> None:
    classes = Classes(["gutartig", "Übergang mit Rand"])
    directory = tmp_path / unicodedata.normalize("NFD", "Übergang mit Rand")
    save(directory / "Größe 1 (ü).png", pixels(1))
    (item,) = list_place(f"folder:{tmp_path}", classes).items
    assert (item.name, item.label) == ("Übergang mit Rand/Größe 1 (ü).png", 1)
    table = tmp_path / "liste.csv"
    table.write_text(f"image,label\n{directory.name}/Größe 1 (ü).png,{directory.name}\n")
    (item,) = list_place(f"csv:{table}", classes).items
    assert item.label == 1


def test_a_directory_that_is_no_class_is_an_error_that_names_the_nearest(tmp_path: Path) -> None:
    place = site(tmp_path, adenom=1, normal=1)
    said = refusal(place)
    assert f"{tmp_path}: the directory 'adenom' is no class of the federation; did you mean 'adenoma'?" in said
    assert "its classes (data.classes) are adenoma, normal, polyp" in said
    (tmp_path / "train").mkdir()
    assert "(nor are 1 more)" in refusal(place)


def test_hidden_and_system_files_are_counted_and_empty_directories_named(tmp_path: Path) -> None:
    place = site(tmp_path, adenoma=1, normal=0)
    for name in (".DS_Store", "Thumbs.db", "adenoma/thumbs.db", "adenoma/._000.png", "adenoma/desktop.ini"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / ".git").mkdir()
    listing = found(place)
    assert (len(listing.items), listing.refused, listing.ignored, listing.empty) == (1, (), 6, (1,))
    summary = load(place, tmp_path).summary
    assert summary.ignored == 6
    assert summary.empty == ("normal",)
    assert summary.lacking == ["normal", "polyp"]
    assert [*summary.notes()][:3] == [
        "6 hidden or system files are ignored",
        "without any image in the directory: normal",
        "without any image here: polyp",
    ]


def test_links_are_followed_and_rings_of_them_end(tmp_path: Path) -> None:
    place = site(tmp_path / "site", adenoma=1)
    site(tmp_path / "archive", old=2)
    adenoma = tmp_path / "site" / "adenoma"
    (adenoma / "archive").symlink_to(tmp_path / "archive" / "old")
    (adenoma / "one.png").symlink_to(tmp_path / "archive" / "old" / "000.png")
    (adenoma / "self").symlink_to(adenoma)
    (adenoma / "up").symlink_to(tmp_path / "site")
    (adenoma / "gone.png").symlink_to(tmp_path / "nowhere.png")
    (tmp_path / "site" / "normal").symlink_to(tmp_path / "archive" / "old")
    os.mkfifo(adenoma / "pipe.png")
    listing = found(place)
    assert [*names(listing)] == [
        "adenoma/000.png",
        "adenoma/archive/000.png",
        "adenoma/archive/001.png",
        "adenoma/one.png",
        "normal/000.png",
        "normal/001.png",
    ]
    assert refused(listing) == {
        "adenoma/gone.png": "is a link to what is not there",
        "adenoma/pipe.png": "is no regular file",
        "adenoma/self": "is a link to a directory above it",
        "adenoma/up": "is a link to a directory above it",
    }


def test_what_lies_beside_the_class_directories_is_refused_and_said(tmp_path: Path) -> None:
    place = site(tmp_path, adenoma=1)
    save(tmp_path / "loose.png", pixels(1))
    assert refused(found(place)) == {"loose.png": "lies in no directory of a class"}


def test_places_without_images_say_what_is_missing(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    said = refusal(f"folder:{gone}")
    assert said == (
        f"{gone}: the directory of images cannot be read (No such file or directory); give the path of what is there"
    )
    gone.mkdir()
    assert "holds no directory of a class; make one for each" in refusal(f"folder:{gone}")
    (gone / "polyp").mkdir()
    assert refusal(f"folder:{gone}") == f"{gone}: holds no image of any class; put images there, or give another place"
    for kind in ("csv", "npz"):
        assert f"{tmp_path}/no.{kind}: cannot be read (No such file" in refusal(f"{kind}:{tmp_path}/no.{kind}")


@pytest.fixture
def as_nobody() -> Iterator[Path]:
    """A folder of this test; what root may read, a user may not."""
    import tempfile

    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


class User:
    """For a while, a user who is not root."""

    def __enter__(self) -> None:
        if os.geteuid() == 0:
            os.seteuid(65534)

    def __exit__(self, *_: object) -> None:
        if os.getuid() == 0:
            os.seteuid(0)


def test_a_file_without_permission_is_refused_and_read_once_that_is_mended(as_nobody: Path) -> None:
    place = site(as_nobody, adenoma=6)
    load(place, as_nobody)  # all that is imported when it is needed
    shutil.rmtree(as_nobody / ".cache")
    closed = as_nobody / "adenoma" / "003.png"
    closed.chmod(0)
    with User():
        first = load(place, as_nobody)
        again = load(place, as_nobody)
    assert refused(first) == {"adenoma/003.png": "cannot be read (Permission denied)"}
    assert not again.were_kept  # it was tried again
    closed.chmod(0o644)
    with User():
        whole = load(place, as_nobody)
    assert refused(whole) == {}
    assert len(whole.dataset.train) == 6
    assert first.digest != whole.digest


def test_a_directory_without_permission_is_an_error(as_nobody: Path) -> None:
    place = site(as_nobody, adenoma=1, normal=1)
    directory = as_nobody / "normal"
    directory.chmod(0)
    with User():
        said = refusal(place)
    assert said == (
        f"{directory}: the directory of images cannot be read (Permission denied); see that this user may read it"
    )
    directory.chmod(0o755)


# --- csv --------------------------------------------------------------------------------------------------------------


def table(folder: Path, text: str, *, images: int = 6, encoding: str = "utf-8") -> str:
    for i in range(images):
        save(folder / "scans" / f"{i}.png", pixels(i))
    (folder / "images.csv").write_text(text, encoding=encoding)
    return f"csv:{folder / 'images.csv'}"


def test_a_csv_file_has_a_row_an_image(tmp_path: Path) -> None:
    place = table(
        tmp_path,
        "image,label,patient,age\n"
        "scans/1.png, normal ,A,50\n"
        f"{tmp_path}/scans/0.png,adenoma,B,\n\n"
        '"scans/2.png","polyp","A, the second",3\n',
    )
    items = {Path(item.name).name: (CLASSES[item.label], item.patient) for item in found(place).items}
    assert items == {
        "0.png": ("adenoma", "B"),
        "1.png": ("normal", "A"),
        "2.png": ("polyp", "A, the second"),
    }


def test_a_csv_file_as_spreadsheets_write_it(tmp_path: Path) -> None:
    place = table(tmp_path, "image;label\r\nscans/0.png;normal\r\n", encoding="utf-8-sig")
    assert names(found(place)) == {"scans/0.png": "normal"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("image,labels\nscans/0.png,normal\n", "'label' is not there; found image, labels"),
        ("", "'image' is not there; found nothing"),
        ("image,label\n", "has no row but its heading"),
        ("image,label\nscans/0.png,Normal\n", "row 2: the label 'Normal' is no class of the federation; did you mean"),
        ("image,label\nscans/0.png,normal\nscans/1.png,\n", "row 3: has no label; every row must have one"),
        ("image,label\nscans/0.png,normal\nscans/0.png,polyp\n", "row 3: image 'scans/0.png' is polyp, and in row 2"),
        (
            "image,label,patient\nscans/0.png,normal,\n",
            "row 2: has no patient; every row has one or the column is left",
        ),
        ("image,label,split\nscans/0.png,normal,train\nscans/1.png,normal\n", "row 3: has no split"),
        ("image,label,split\nscans/0.png,normal,val\n", "split 'val' is no part; did you mean 'validation'?"),
        ("image,label,Patient\nscans/0.png,normal,A\n", "'Patient' has no meaning; did you mean 'patient'?"),
        ("image,label,label\na,b,c\n", "the column 'label' is there twice"),
        ('image,label\n"scans/0.png,normal\n', "is no csv file"),
        (
            "image,label,patient,split\nscans/0.png,normal,A,train\nscans/1.png,normal,A,test\n",
            "row 3: patient 'A' is in test, and in row 2 in train; put all images of a patient in one part",
        ),
    ],
)
def test_a_csv_file_that_does_not_fit_says_where(tmp_path: Path, text: str, words: str) -> None:
    said = refusal(table(tmp_path, text, images=2))
    assert words in said
    assert str(tmp_path / "images.csv") in said


def test_a_csv_file_that_is_no_text(tmp_path: Path) -> None:
    place = table(tmp_path, "image,label\nscans/0.png,normal\n", encoding="utf-16")
    assert "is not UTF-8 text" in refusal(place)


def test_images_of_a_csv_file_that_are_not_there_are_refused_one_by_one(tmp_path: Path) -> None:
    place = table(tmp_path, "image,label\nscans/0.png,normal\nno.png,normal\nscans,normal\nscans/0.png,normal\n")
    assert refused(found(place)) == {
        "no.png": "cannot be read (No such file or directory)",
        "scans": "is no regular file",
        "scans/0.png (row 5)": "is in row 2 already",
    }


# --- npz --------------------------------------------------------------------------------------------------------------


def arrays(folder: Path, **content: Any) -> str:
    path = folder / "site.npz"
    np.savez(path, **content)
    return f"npz:{path}"


def test_an_npz_file_is_matched_by_its_class_names(tmp_path: Path) -> None:
    images = pixels(1, 6, HEIGHT, WIDTH, 3)
    place = arrays(tmp_path, train_images=images, train_labels=[0, 1, 0, 1, 1, 1], class_names=["polyp", "adenoma"])
    here = load(place, tmp_path)
    labels = [CLASSES[label] for label in here.dataset.train.labels]
    assert labels == ["polyp", "adenoma", "polyp", "adenoma", "adenoma", "adenoma"]
    by_name = arrays(tmp_path, train_images=images, train_labels=labels)
    again = load(by_name, tmp_path)
    np.testing.assert_array_equal(again.dataset.train.labels, here.dataset.train.labels)
    np.testing.assert_array_equal(again.dataset.train.images, here.dataset.train.images)
    assert again.digest == here.digest


def test_parts_of_an_npz_file_stand_and_one_that_is_missing_is_cut_out_of_train(tmp_path: Path) -> None:
    def part(name: str, count: int, seed: int) -> dict[str, Any]:
        labels = [CLASSES[i % 2] for i in range(count)]
        return {f"{name}_images": pixels(seed, count, 9, 9), f"{name}_labels": labels}

    train, val, test = part("train", 40, 1), part("val", 5, 2), part("test", 7, 3)
    all_three = load(arrays(tmp_path, **train, **val, **test), tmp_path)
    assert [*map(len, vars(all_three.split).values())] == [40, 5, 7]
    assert all_three.summary.split == "as given"
    without = load(arrays(tmp_path, **train, **test), tmp_path)
    assert [*map(len, vars(without.split).values())] == [36, 4, 7]
    assert without.summary.split == "as given, validation cut out of train by class"
    alone = load(arrays(tmp_path, **train), tmp_path)
    assert [*map(len, vars(alone.split).values())] == [32, 4, 4]
    patients = load(arrays(tmp_path, **train, train_patient=np.arange(40) // 4), tmp_path)
    assert patients.summary.patients == {"train": 8, "validation": 1, "test": 1}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"images": [1]}, "must hold train_images and train_labels"),
        ({"train_labels": [0]}, "must hold 'class_names', since the number of a class says nothing at another site"),
        ({"train_labels": [2], "class_names": ["normal", "polyp"]}, "row 0 is 2, and there are 2 class_names"),
        (
            {"train_labels": ["norml"]},
            "'train_labels' row 0, class 'norml' is no class of the federation; did you mean",
        ),
        ({"train_labels": [[1, 0]], "class_names": ["normal"]}, "must be class names or whole numbers of shape [n]"),
        ({"train_labels": ["normal"], "train_patient": ["a", "b"]}, "'train_patient' must be a text or whole number"),
        ({"train_labels": ["normal"], "train_patient": [""]}, "'train_patient' row 0 is empty"),
    ],
)
def test_an_npz_file_that_does_not_fit_says_where(tmp_path: Path, content: dict[str, Any], words: str) -> None:
    assert words in refusal(arrays(tmp_path, **content))


@pytest.mark.parametrize(
    ("images", "words"),
    [
        (np.zeros((1, 5, 5), np.float32), "must be uint8 or uint16, found float32"),
        (np.zeros((1, 5, 5, 2), np.uint8), "must have the shape"),
        (np.zeros((2, 5, 5), np.uint8), "'train_labels' has 1 rows for 2 images"),
        (None, "must hold the arrays train_images"),
    ],
)
def test_images_of_an_npz_file_that_do_not_fit_say_so(tmp_path: Path, images: Any, words: str) -> None:
    more = {} if images is None else {"train_images": images}
    with pytest.raises(DataError, match=words.replace("[", r"\[")):
        load(arrays(tmp_path, train_labels=["normal"], **more), tmp_path)


# --- reading ----------------------------------------------------------------------------------------------------------


def test_a_corrupt_file_is_refused_and_the_others_are_used(tmp_path: Path) -> None:
    place = site(tmp_path, adenoma=4, normal=3)
    (tmp_path / "adenoma" / "001.png").write_bytes(b"\x89PNG\r\n\x1a\n and nothing else")
    (tmp_path / "adenoma" / "notes.txt").write_text("seen by Dr. A")
    here = load(place, tmp_path)
    assert refused(here) == {
        "adenoma/001.png": "is damaged: its beginning is that of an image, and the rest is not",
        "adenoma/notes.txt": "is no PNG, JPEG, TIFF or DICOM file",
    }
    assert here.summary.images["adenoma"] == {"train": 3, "validation": 0, "test": 0}
    assert "2 files are refused, the first: adenoma/001.png, which is damaged" in next(here.summary.warnings())


def test_a_class_of_which_no_image_can_be_read_ends_it(tmp_path: Path) -> None:
    place = site(tmp_path, adenoma=4, normal=2)
    for i in range(2):
        (tmp_path / "normal" / f"{i:03d}.png").write_bytes(b"text")
    with pytest.raises(DataError) as caught:
        load(place, tmp_path)
    assert str(caught.value) == (
        f"{tmp_path}: none of 2 files of class 'normal' can be used; 'normal/000.png' is no PNG, JPEG, TIFF or DICOM "
        f"file: mend them, or take them away"
    )


def test_a_grey_site_and_a_deep_site_give_images_like_any_other(tmp_path: Path) -> None:
    grey, deep = pixels(1, 20, 20), np.full((20, 20), 2048, np.uint16)
    save(tmp_path / "grey" / "normal" / "a.png", grey)
    image = load(f"folder:{tmp_path / 'grey'}", tmp_path / "1").dataset.train.images[0]
    assert image.shape == (3, 8, 8)
    assert (image[0] == image[1]).all()
    folder = tmp_path / "deep" / "normal"
    folder.mkdir(parents=True)
    (folder / "a.tif").write_bytes(tiff16(deep))
    window = Rendering(8, 3, (0, 4095))
    image = load(f"folder:{tmp_path / 'deep'}", tmp_path / "2", rendering=window).dataset.train.images[0]
    assert (image == 128).all()


def test_images_and_labels_belong_together_whatever_the_threads(tmp_path: Path) -> None:
    place = site(tmp_path, adenoma=30, normal=20, polyp=10)
    several = decode(found(place), SIZE, tmp_path / ".a", "own", threads=7)
    one = decode(found(place), SIZE, tmp_path / ".b", "own", threads=1)
    np.testing.assert_array_equal(several.images, one.images)
    assert several.items == one.items
    for item, image in zip(one.items, one.images, strict=True):
        assert item.path is not None
        from crad_p2p.data.own.formats import render_file

        np.testing.assert_array_equal(render_file(item.path, SIZE)[1], image)


# --- the cache --------------------------------------------------------------------------------------------------------


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of all images that are read from now on."""
    seen: list[str] = []
    from crad_p2p.data.own import listing

    real = listing.render_file

    def render(path: Path, rendering: Rendering) -> Any:
        seen.append(path.name)
        return real(path, rendering)

    monkeypatch.setattr(listing, "render_file", render)
    return seen


def test_images_are_read_once(tmp_path: Path, reads: list[str]) -> None:
    place = site(tmp_path, adenoma=5, normal=3)
    (tmp_path / "normal" / "bad.png").write_bytes(b"bad")
    (tmp_path / ".cache").mkdir()
    steps: list[tuple[int, int]] = []
    first = load(place, tmp_path, progress=lambda *step: steps.append(step))
    assert len(reads) == 9
    assert steps == [(n, 9) for n in range(1, 10)]
    again = load(place, tmp_path)
    assert len(reads) == 9
    assert again.were_kept
    np.testing.assert_array_equal(again.dataset.train.images, first.dataset.train.images)
    assert isinstance(again.dataset.train.images, np.memmap)
    assert again.digest == first.digest
    assert again.summary == first.summary
    for name in ("own.images", "own.json"):
        assert (tmp_path / ".cache" / name).stat().st_mode & 0o777 == 0o600


def test_they_are_read_again_when_anything_changes(tmp_path: Path, reads: list[str]) -> None:
    place = site(tmp_path, adenoma=3)
    load(place, tmp_path)

    def all_are_read(**options: Any) -> None:
        reads.clear()
        assert not load(place, tmp_path, **options).were_kept
        assert len(reads) >= 3
        reads.clear()
        assert load(place, tmp_path, **options).were_kept

    image = tmp_path / "adenoma" / "001.png"
    os.utime(image, ns=(0, image.stat().st_mtime_ns + 1))
    all_are_read()
    save(tmp_path / "adenoma" / "new.png", pixels(50))
    all_are_read()
    image.rename(image.with_name("other.png"))
    all_are_read()
    for rendering in (Rendering(9, 3), Rendering(9, 1), Rendering(9, 1, (0, 100))):
        all_are_read(rendering=rendering)


def test_another_class_of_the_same_images_needs_no_reading(tmp_path: Path) -> None:
    place = table(tmp_path, "image,label\nscans/0.png,normal\nscans/1.png,polyp\n")
    first = load(place, tmp_path)
    table(tmp_path, "image,label\nscans/0.png,adenoma\nscans/1.png,polyp\n", images=0)
    again = load(place, tmp_path)
    assert again.were_kept
    assert again.dataset.train.labels.tolist() == [0, 2]
    assert again.digest != first.digest


@pytest.mark.parametrize("damage", ["bit", "cut", "index", "digests", "gone"])
def test_a_damaged_cache_is_made_again(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    place = site(tmp_path, adenoma=3)
    whole = np.array(load(place, tmp_path).dataset.train.images)
    images, index = (tmp_path / ".cache" / name for name in ("own.images", "own.json"))
    match damage:
        case "bit":
            content = bytearray(images.read_bytes())
            content[100] ^= 1
            images.write_bytes(content)
        case "cut":
            images.write_bytes(images.read_bytes()[:-1])
        case "index":
            index.write_text("{")
        case "digests":
            index.write_text(json.dumps({**json.loads(index.read_text()), "digests": []}))
        case "gone":
            images.unlink()
    again = load(place, tmp_path)
    assert not again.were_kept
    np.testing.assert_array_equal(again.dataset.train.images, whole)
    assert ("all images are read again" in caplog.text) == (damage != "gone")


def test_a_start_that_is_killed_while_it_reads_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = site(tmp_path, adenoma=3)
    before = load(place, tmp_path)
    content = (tmp_path / ".cache" / "own.images").read_bytes()

    class Killed(BaseException):
        pass

    def kill(*_: object) -> None:
        raise Killed

    with pytest.raises(Killed):
        load(place, tmp_path, rendering=Rendering(9, 3), progress=kill)
    assert (tmp_path / ".cache" / "own.images").read_bytes() == content
    assert load(place, tmp_path).were_kept
    # Killed between the two files: the index is of the images before.
    monkeypatch.setattr(caching, "write_file", kill)
    with pytest.raises(Killed):
        load(place, tmp_path, rendering=Rendering(9, 3))
    monkeypatch.undo()
    again = load(place, tmp_path)
    assert not again.were_kept
    assert again.digest == before.digest


def test_another_cache_is_looked_into_and_not_written_to(tmp_path: Path) -> None:
    place = site(tmp_path, adenoma=3)
    load(place, tmp_path)
    look = Cache(tmp_path / ".scratch", (tmp_path / ".cache",))
    assert load(place, tmp_path, cache=look).were_kept
    assert not look.folder.exists()
    assert not load(place, tmp_path, cache=look, rendering=Rendering(9, 3)).were_kept
    assert load(place, tmp_path).were_kept


def test_a_file_is_replaced_only_when_the_block_has_ended(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("before")
    with pytest.raises(RuntimeError), replacing(path) as file:  # noqa: PT012
        file.write(b"after")
        raise RuntimeError
    assert path.read_text() == "before"
    with replacing(path, 0o600) as file:
        file.write(b"after")
        assert path.read_text() == "before"
    assert path.read_text() == "after"
    assert [*tmp_path.iterdir()] == [path]


# --- dividing ---------------------------------------------------------------------------------------------------------


def parts_of(here: Site) -> dict[str, list[int]]:
    """Images of every class in each part."""
    labels = here.dataset.train.labels
    return {name: np.bincount(labels[index], minlength=3).tolist() for name, index in vars(here.split).items()}


def test_by_class_as_shards_of_a_common_set_are(tmp_path: Path) -> None:
    place = site(tmp_path, adenoma=20, normal=10, polyp=3)
    here = load(place, tmp_path)
    assert parts_of(here) == {"train": [16, 8, 3], "validation": [2, 1, 0], "test": [2, 1, 0]}
    assert here.summary.unvalidated == ["polyp"]
    assert "no image to validate" in "".join(here.summary.notes())
    everything = np.sort(np.concatenate([*vars(here.split).values()]))
    np.testing.assert_array_equal(everything, np.arange(33))
    same, seed, peer = (load(place, tmp_path, **options).digest for options in ({}, {"seed": 8}, {"peer": 1}))
    assert same == here.digest
    assert len({here.digest, seed, peer}) == 3


def test_a_split_column_stands(tmp_path: Path) -> None:
    rows = [f"scans/{i}.png,{CLASSES[i % 2]},{('train', 'validation', 'test')[i % 3]}" for i in range(6)]
    here = load(table(tmp_path, "image,label,split\n" + "\n".join(rows) + "\n"), tmp_path)
    assert parts_of(here) == {"train": [1, 1, 0], "validation": [1, 1, 0], "test": [1, 1, 0]}
    assert here.summary.split == "as given"
    alone = load(table(tmp_path, "image,label,split\nscans/0.png,normal,train\n"), tmp_path)
    assert parts_of(alone) == {"train": [0, 1, 0], "validation": [0, 0, 0], "test": [0, 0, 0]}


def test_no_patient_is_in_two_parts_and_the_shares_are_about_right() -> None:
    rng = np.random.default_rng(0)
    who = rng.integers(0, 120, 600)
    labels = np.where(rng.random(600) < 0.2, 2, who % 2)  # most patients have one class, some two
    split, how = divide(labels, [f"p{each}" for each in who], [None] * 600, 0.2, rng, may_cut=False)
    assert how == "by patient"
    people = [{*who[index]} for index in vars(split).values()]
    assert sum(map(len, people)) == len({*who})
    for label in range(3):
        total = (labels == label).sum()
        train, validation, test = ((labels[index] == label).sum() / total for index in vars(split).values())
        assert abs(train - 0.8) < 0.05
        assert abs(validation - 0.1) < 0.04
        assert abs(test - 0.1) < 0.04


def test_one_patient_or_a_huge_one_trains() -> None:
    def sizes(who: list[str], labels: list[int] | None = None) -> list[int]:
        rng = np.random.default_rng(1)
        of = np.array(labels or [0] * len(who))
        split, _ = divide(of, who, [None] * len(who), 0.2, rng, may_cut=False)
        return [*map(len, vars(split).values())]

    assert sizes(["a"] * 9) == [9, 0, 0]
    assert sizes(["a"] * 80 + [f"p{i}" for i in range(20)]) == [80, 10, 10]
    assert sizes(["a", "b", "c"], [0, 1, 2]) == [3, 0, 0]
    assert sizes([f"p{i}" for i in range(5)]) == [4, 1, 0]


def test_patients_of_a_csv_file_are_kept_together(tmp_path: Path) -> None:
    rows = [f"scans/{i}.png,{CLASSES[i % 2]},P{i // 3}" for i in range(60)]
    here = load(table(tmp_path, "image,label,patient\n" + "\n".join(rows) + "\n", images=60), tmp_path)
    patients = here.summary.patients
    assert patients is not None
    assert sum(patients.values()) == 20
    assert patients["train"] == 16
    assert "own images of 20 patients, divided by patient:" in [*here.summary.log_lines()][-1]
    assert "patients" in "\n".join(here.summary.table())


# --- summing up -------------------------------------------------------------------------------------------------------


def test_duplicates_in_two_parts_or_of_two_classes_are_counted(tmp_path: Path) -> None:
    place = site(tmp_path, adenoma=20, normal=20)
    for i in range(20):  # so that some pair must be divided
        shutil.copy(tmp_path / "adenoma" / f"{i:03d}.png", tmp_path / "adenoma" / f"copy-{i}.png")
    shutil.copy(tmp_path / "adenoma" / "000.png", tmp_path / "normal" / "same.png")
    found = load(place, tmp_path).summary.duplicates
    assert found.groups == 20
    assert found.across_classes == 1
    assert 1 <= found.across_parts < 20
    assert {"adenoma/000.png", "adenoma/copy-0.png", "normal/same.png"} in map(set, found.examples)
    assert len(found.examples) == 5


def test_the_summary_is_a_file_for_programs_and_one_for_people(tmp_path: Path) -> None:
    place = site(tmp_path / "site", adenoma=20, normal=10)
    (tmp_path / "site" / "normal" / "bad \n.png").write_bytes(b"bad")
    here = load(place, tmp_path)
    here.summary.write(tmp_path)
    tree = json.loads((tmp_path / "data-summary.json").read_text())
    assert tree["images"]["adenoma"] == {"train": 16, "validation": 2, "test": 2}
    assert tree["refused"] == [{"name": "normal/bad \n.png", "reason": "is no PNG, JPEG, TIFF or DICOM file"}]
    assert tree["patients"] is None
    text = (tmp_path / "data-summary.txt").read_text().splitlines()
    assert text[:6] == [
        f"folder:{tmp_path}/site: divided by class",
        "",
        "class       train  validation  test",
        "adenoma        16           2     2",
        "normal          8           1     1",
        "polyp           0           0     0",
    ]
    assert r"  refused: normal/bad \n.png: is no PNG, JPEG, TIFF or DICOM file" in text
    assert (tmp_path / "data-summary.json").stat().st_mode & 0o777 == 0o600


# --- the common test set ----------------------------------------------------------------------------------------------


def common_test(place: str, folder: Path) -> CommonTest:
    return load_test(place, CLASSES, SIZE, Cache(folder / ".cache"))


def test_the_common_test_set_is_the_same_under_any_names_and_in_any_order(tmp_path: Path) -> None:
    place = site(tmp_path / "a", adenoma=2, normal=1)
    shutil.copytree(tmp_path / "a" / "normal", tmp_path / "b" / "normal" / "deeper")
    for old, new in (("000", "z"), ("001", "a")):
        save(tmp_path / "b" / "adenoma" / f"{new}.png", np.zeros((1, 1), np.uint8))
        shutil.copy(tmp_path / "a" / "adenoma" / f"{old}.png", tmp_path / "b" / "adenoma" / f"{new}.png")
    one, other = common_test(place, tmp_path), common_test(f"folder:{tmp_path / 'b'}", tmp_path)
    assert one.digest == other.digest
    assert len(one.images) == 3
    (tmp_path / "b" / "adenoma" / "z.png").rename(tmp_path / "b" / "normal" / "z.png")
    assert common_test(f"folder:{tmp_path / 'b'}", tmp_path).digest != one.digest


def test_the_common_test_set_must_be_whole(tmp_path: Path) -> None:
    place = site(tmp_path, adenoma=2)
    (tmp_path / "adenoma" / "bad.png").write_bytes(b"bad")
    with pytest.raises(DataError, match=r"'adenoma/bad.png' is no PNG.*must be whole, since it is the same on every"):
        common_test(place, tmp_path)


def test_of_a_place_with_parts_the_common_test_set_is_the_part_test(tmp_path: Path) -> None:
    rows = "scans/0.png,normal,test\nscans/1.png,normal,train\nscans/2.png,polyp,test\n"
    assert len(common_test(table(tmp_path, f"image,label,split\n{rows}"), tmp_path).images) == 2
    content = {"train_images": pixels(1, 3, 9, 9), "train_labels": ["normal"] * 3}
    content |= {"test_images": pixels(2, 2, 9, 9), "test_labels": ["normal"] * 2}
    assert len(common_test(arrays(tmp_path, **content), tmp_path).images) == 2
    place = table(tmp_path, "image,label,split\nscans/0.png,normal,train\n")
    with pytest.raises(DataError, match="has no image of the part 'test'"):
        common_test(place, tmp_path)


def test_own_images_that_are_in_the_common_test_set_are_counted(tmp_path: Path) -> None:
    place = site(tmp_path / "test", adenoma=3)
    own = site(tmp_path / "own", adenoma=10)
    here = load(own, tmp_path, test=common_test(place, tmp_path))
    learned = {*here.split.train.tolist(), *here.split.validation.tolist()} & {0, 1, 2}
    assert here.summary.duplicates.in_common_test == len(learned)
    assert "in the common test set" in "".join(here.summary.warnings())
    assert len(here.dataset.test) == 3
    assert len(load(own, tmp_path).dataset.test) == 0


def test_bytes_and_not_pixels_are_what_the_digest_is_of(tmp_path: Path) -> None:
    place = site(tmp_path, adenoma=1)
    found = decode(list_place(place, Classes(CLASSES)), SIZE, tmp_path / ".cache", "own")
    assert found.digests == (hashlib.sha256((tmp_path / "adenoma" / "000.png").read_bytes()).hexdigest(),)
