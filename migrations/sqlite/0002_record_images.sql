-- What the names of images meant when the run first used them.
CREATE TABLE images (
  name        TEXT    PRIMARY KEY,
  image_id    TEXT    NOT NULL,
  digest      TEXT,
  epoch       INTEGER NOT NULL,
  recorded_us INTEGER NOT NULL
) STRICT;
