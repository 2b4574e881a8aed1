"""Data sets, their split over peers, and the order and augmentation of one local epoch."""
