-- Settings that were changed when the run was resumed, in the order of the changes.
CREATE TABLE amendments (
  seq         INTEGER PRIMARY KEY,
  assignment  TEXT    NOT NULL,
  epoch       INTEGER NOT NULL,
  recorded_us INTEGER NOT NULL
) STRICT;
