"""Images that a site brings itself: found, read, scaled, kept in a cache, and split into train, validation and test."""
