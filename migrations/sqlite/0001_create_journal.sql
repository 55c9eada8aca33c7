-- The journal of one run. Times are microseconds since the Unix epoch, UTC, for people only.
-- Every row carries the epoch of the coordinator that wrote it last; epochs never decrease.

CREATE TABLE run (
  only_row    INTEGER PRIMARY KEY CHECK (only_row = 1),
  run_id      TEXT    NOT NULL,
  epoch       INTEGER NOT NULL,
  plan_digest TEXT    NOT NULL,
  created_us  INTEGER NOT NULL
) STRICT;

-- Weights, by version. `announced` before engines load them, `live` after all of them answered.
CREATE TABLE policy_versions (
  version      INTEGER PRIMARY KEY,
  lineage      INTEGER NOT NULL,
  checkpoint   TEXT    NOT NULL,
  state        TEXT    NOT NULL CHECK (state IN ('announced', 'live')),
  epoch        INTEGER NOT NULL,
  announced_us INTEGER NOT NULL,
  live_us      INTEGER
) STRICT;

CREATE TABLE steps (
  step         INTEGER PRIMARY KEY CHECK (step >= 1),
  step_id      TEXT    NOT NULL UNIQUE,
  state        TEXT    NOT NULL CHECK (state IN ('sampling', 'training', 'trained', 'applied', 'skipped')),
  base_version INTEGER NOT NULL,
  result       TEXT,
  metrics      TEXT,
  reason       TEXT,
  epoch        INTEGER NOT NULL,
  opened_us    INTEGER NOT NULL,
  closed_us    INTEGER
) STRICT;

CREATE TABLE evals (
  round          INTEGER PRIMARY KEY,
  policy_version INTEGER NOT NULL,
  state          TEXT    NOT NULL CHECK (state IN ('running', 'done')),
  metrics        TEXT,
  epoch          INTEGER NOT NULL,
  opened_us      INTEGER NOT NULL,
  closed_us      INTEGER
) STRICT;

-- A training group (`step` = global step) or an evaluation group (`step` = round).
CREATE TABLE groups (
  group_id  TEXT    PRIMARY KEY,
  kind      TEXT    NOT NULL CHECK (kind IN ('train', 'eval')),
  step      INTEGER NOT NULL,
  task_id   TEXT    NOT NULL,
  size      INTEGER NOT NULL CHECK (size >= 1),
  state     TEXT    NOT NULL CHECK (state IN ('filling', 'kept', 'dropped')),
  reason    TEXT,
  epoch     INTEGER NOT NULL,
  opened_us INTEGER NOT NULL,
  closed_us INTEGER
) STRICT;
CREATE INDEX groups_by_step ON groups (kind, step);

CREATE TABLE episodes (
  episode_id TEXT    PRIMARY KEY,
  group_id   TEXT    NOT NULL REFERENCES groups (group_id),
  member     INTEGER NOT NULL,
  state      TEXT    NOT NULL CHECK (state IN ('open', 'sealed', 'quarantined')),
  epoch      INTEGER NOT NULL,
  UNIQUE (group_id, member)
) STRICT;

-- `intended` is committed before anything is started for the attempt.
CREATE TABLE attempts (
  attempt_id TEXT    PRIMARY KEY,
  episode_id TEXT    NOT NULL REFERENCES episodes (episode_id),
  attempt    INTEGER NOT NULL CHECK (attempt >= 1),
  state      TEXT    NOT NULL CHECK (state IN ('intended', 'sealed', 'superseded', 'broken', 'aborted', 'lost')),
  outcome    TEXT,
  summary    TEXT,
  blob       TEXT,
  blob_bytes INTEGER,
  epoch      INTEGER NOT NULL,
  opened_us  INTEGER NOT NULL,
  closed_us  INTEGER,
  UNIQUE (episode_id, attempt),
  CHECK (state <> 'sealed' OR blob IS NOT NULL)
) STRICT;
-- INV-2: at most one sealed attempt per episode; and at most one under way.
CREATE UNIQUE INDEX one_sealed_attempt ON attempts (episode_id) WHERE state = 'sealed';
CREATE UNIQUE INDEX one_open_attempt ON attempts (episode_id) WHERE state = 'intended';

CREATE TABLE batches (
  step         INTEGER PRIMARY KEY REFERENCES steps (step),
  state        TEXT    NOT NULL CHECK (state IN ('assembling', 'published', 'applied', 'retired')),
  folder       TEXT    NOT NULL,
  digest       TEXT,
  epoch        INTEGER NOT NULL,
  opened_us    INTEGER NOT NULL,
  published_us INTEGER
) STRICT;

-- INV-4: the primary key lets an episode be in one batch only.
CREATE TABLE batch_members (
  episode_id TEXT    PRIMARY KEY REFERENCES episodes (episode_id),
  step       INTEGER NOT NULL REFERENCES batches (step),
  position   INTEGER NOT NULL,
  advantage  REAL    NOT NULL,
  epoch      INTEGER NOT NULL,
  UNIQUE (step, position)
) STRICT;
