"""A csv file with a row an image: ``image``, ``label``, and perhaps ``patient`` and ``split``."""

from __future__ import annotations

import csv
import difflib
import stat
import unicodedata
from contextlib import suppress
from pathlib import Path

from crad_p2p.data.own.listing import PARTS, Classes, Item, Listing, Refused, cannot_read, stamp_of
from crad_p2p.data.place import plain
from crad_p2p.errors import DataError
from crad_p2p.foreign import printable

_REQUIRED, _OPTIONAL = ("image", "label"), ("patient", "split")
_ADVICE = "correct the row"


def list_csv(place: str, path: Path, classes: Classes) -> Listing:
    """List it. Paths of images are relative to the file; columns with other names are not looked at.

    Raises:
        DataError: it cannot be read, lacks a column, or a row has no value, no class, or another one than an earlier
            row of the same image.
    """
    items: list[Item] = []
    refused: list[Refused] = []
    rows: dict[Path, tuple[int, int]] = {}
    patients: dict[str, tuple[int, str]] = {}
    for number, row in _rows(path):
        where = f"{path}, row {number}"
        name, label = row["image"], classes.number(row["label"])
        if label is None:
            raise classes.no_class(f"{where}: the label", row["label"], _ADVICE)
        part = row.get("split")
        if part is not None and part not in PARTS:
            close = difflib.get_close_matches(part, PARTS, n=1, cutoff=0.3)
            meant = f"; did you mean '{close[0]}'?" if close else ""
            raise DataError(
                f"{where}: split '{printable(part)}' is no part{meant or ';'} allowed are {', '.join(PARTS)}: {_ADVICE}"
            )
        patient = row.get("patient")
        if patient is not None and part is not None:
            first, other = patients.setdefault(patient, (number, part))
            if other != part:
                raise DataError(
                    f"{where}: patient '{printable(patient)}' is in {part}, and in row {first} in {other}; put all "
                    f"images of a patient in one part, or leave the column 'patient' or 'split' out"
                )
        file = _spelled(path.parent, name)
        first, known = rows.setdefault(file, (number, label))
        if first != number:
            if known != label:
                raise DataError(
                    f"{where}: image '{printable(name)}' is {classes.names[label]}, and in row {first} it is "
                    f"{classes.names[known]}; an image has one class: correct one of them"
                )
            refused.append(Refused(f"{plain(name)} (row {number})", f"is in row {first} already"))
            continue
        try:
            what = file.stat()
        except (OSError, ValueError) as error:  # a path with a zero byte is a ValueError
            reason = getattr(error, "strerror", None) or str(error)
            refused.append(Refused(plain(name), f"cannot be read ({reason})"))
            continue
        if not stat.S_ISREG(what.st_mode):
            refused.append(Refused(plain(name), "is no regular file"))
            continue
        items.append(Item(plain(name), label, patient, part, stamp_of(what), file))
    items.sort(key=lambda item: item.name)
    return Listing(place, tuple(items), tuple(refused))


def _spelled(folder: Path, name: str) -> Path:
    """The file of this name, also where the table spells umlauts otherwise than the disk (macOS)."""
    for form in (name, unicodedata.normalize("NFC", name), unicodedata.normalize("NFD", name)):
        with suppress(ValueError):  # a zero byte
            if (folder / form).exists():
                return folder / form
    return folder / name


def _rows(path: Path) -> list[tuple[int, dict[str, str]]]:
    """Every row with its number in the file, from 2 on; the columns that are known, without spaces around values."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:  # spreadsheets put a mark at the beginning
            head = file.readline()
            file.seek(0)
            table = csv.reader(file, delimiter=";" if head.count(";") > head.count(",") else ",", strict=True)
            columns = [plain(name) for name in next(table, [])]
            _check_columns(path, columns)
            rows = []
            for cells in table:
                if any(cell.strip() for cell in cells):
                    rows.append((table.line_num, _row(path, table.line_num, columns, cells)))
    except OSError as error:
        raise cannot_read(path, error) from None
    except UnicodeDecodeError:
        raise DataError(f"{path}: is not UTF-8 text; save it as csv in UTF-8") from None
    except csv.Error as error:
        raise DataError(f"{path}: is no csv file ({error}); save it again as csv in UTF-8") from None
    if not rows:
        raise DataError(f"{path}: has no row but its heading; add one for each image")
    return rows


def _check_columns(path: Path, columns: list[str]) -> None:
    found = ", ".join(map(printable, columns)) or "nothing"
    for name in _REQUIRED:
        if name not in columns:
            raise DataError(
                f"{path}: the first row must name the columns image and label (and perhaps patient and split), and "
                f"'{name}' is not there; found {found}: name it so"
            )
    for name in (*_REQUIRED, *_OPTIONAL):
        if columns.count(name) > 1:
            raise DataError(f"{path}: the column '{name}' is there twice; rename one of them")
    for column in columns:  # a patient column that is not seen would let patients into two parts
        known = (*_REQUIRED, *_OPTIONAL)
        if column not in known and (close := difflib.get_close_matches(column.casefold(), known, n=1, cutoff=0.8)):
            raise DataError(
                f"{path}: the column '{printable(column)}' has no meaning; did you mean '{close[0]}'? Rename it, also "
                f"if not"
            )


def _row(path: Path, number: int, columns: list[str], cells: list[str]) -> dict[str, str]:
    row = {column: cell.strip() for column, cell in zip(columns, cells, strict=False)}
    known = {name: row.get(name, "") for name in (*_REQUIRED, *_OPTIONAL) if name in columns}
    for name, value in known.items():
        if not value:
            rule = "every row has one or the column is left out" if name in _OPTIONAL else "every row must have one"
            raise DataError(f"{path}, row {number}: has no {name}; {rule}")
    return known
