//! Every SQL statement. `$n` placeholders and `ON CONFLICT` work in both SQLite and Postgres.

/// Kind of a training group.
pub(crate) const TRAIN: &str = "train";
/// Kind of an evaluation group.
pub(crate) const EVAL: &str = "eval";

pub(crate) const CHECK_EPOCH: &str = "SELECT epoch FROM run WHERE only_row = 1 AND epoch = $1";
pub(crate) const INSERT_RUN: &str = "INSERT INTO run (only_row, run_id, epoch, plan_digest, created_us, kind) \
     VALUES (1, $1, 0, $2, $3, $4)";
pub(crate) const SELECT_RUN: &str =
    "SELECT run_id, epoch, plan_digest, created_us FROM run WHERE only_row = 1";
pub(crate) const SELECT_KIND: &str = "SELECT kind FROM run WHERE only_row = 1";
pub(crate) const NEXT_EPOCH: &str =
    "UPDATE run SET epoch = epoch + 1 WHERE only_row = 1 RETURNING epoch";
/// Attempts that were running when the last coordinator ended; their outcome is unknown.
pub(crate) const LOSE_ATTEMPTS: &str =
    "UPDATE attempts SET state = 'lost', epoch = $1, closed_us = $2 WHERE state = 'intended'";
/// Reopens episodes that failed only because of the infrastructure.
pub(crate) const REOPEN_QUARANTINED: &str = "UPDATE episodes SET state = 'open', epoch = $1 \
     WHERE state = 'quarantined' \
     AND group_id IN (SELECT group_id FROM groups WHERE state = 'filling')";
pub(crate) const INSERT_IMAGE: &str = "INSERT INTO images \
     (name, image_id, digest, epoch, recorded_us) VALUES ($1, $2, $3, $4, $5) \
     ON CONFLICT (name) DO NOTHING";
pub(crate) const SELECT_IMAGE: &str = "SELECT name, image_id, digest FROM images WHERE name = $1";
pub(crate) const SELECT_IMAGES: &str = "SELECT name, image_id, digest FROM images ORDER BY name";
pub(crate) const INSERT_AMENDMENT: &str =
    "INSERT INTO amendments (assignment, epoch, recorded_us) VALUES ($1, $2, $3)";
pub(crate) const SELECT_AMENDMENTS: &str =
    "SELECT assignment, epoch, recorded_us FROM amendments ORDER BY seq";
pub(crate) const HAS_BEGUN: &str = "SELECT COUNT(*) FROM groups";
pub(crate) const NAMED_BLOBS: &str = "SELECT blob FROM attempts WHERE blob IS NOT NULL";

pub(crate) const INSERT_GROUP: &str = "INSERT INTO groups \
     (group_id, kind, step, task_id, size, state, epoch, opened_us) \
     VALUES ($1, $2, $3, $4, $5, 'filling', $6, $7) ON CONFLICT (group_id) DO NOTHING";
pub(crate) const INSERT_EPISODE: &str = "INSERT INTO episodes \
     (episode_id, group_id, member, state, epoch) VALUES ($1, $2, $3, 'open', $4) \
     ON CONFLICT (episode_id) DO NOTHING";
pub(crate) const DECIDE_GROUP: &str = "UPDATE groups \
     SET state = $2, reason = $3, epoch = $4, closed_us = $5 \
     WHERE group_id = $1 AND state = 'filling'";
pub(crate) const SELECT_GROUP: &str = "SELECT group_id, step, task_id, size, state, reason \
     FROM groups WHERE group_id = $1";
pub(crate) const SELECT_GROUPS: &str = "SELECT group_id, step, task_id, size, state, reason \
     FROM groups WHERE kind = $1 AND step = $2 ORDER BY group_id";
pub(crate) const COUNT_TRAIN_GROUPS: &str = "SELECT COUNT(*) FROM groups WHERE kind = 'train'";

pub(crate) const SELECT_EPISODE_STATE: &str = "SELECT state FROM episodes WHERE episode_id = $1";
pub(crate) const SET_EPISODE_STATE: &str = "UPDATE episodes SET state = $2, epoch = $3 \
     WHERE episode_id = $1 AND state = 'open'";
pub(crate) const SELECT_EPISODES: &str = "SELECT e.episode_id, e.state, g.task_id, \
     (SELECT COUNT(*) FROM attempts a WHERE a.episode_id = e.episode_id) \
     FROM episodes e JOIN groups g ON g.group_id = e.group_id \
     WHERE e.group_id = $1 ORDER BY e.member";
pub(crate) const SELECT_ALL_EPISODES: &str = "SELECT e.episode_id, e.state, g.task_id, \
     (SELECT COUNT(*) FROM attempts a WHERE a.episode_id = e.episode_id) \
     FROM episodes e JOIN groups g ON g.group_id = e.group_id ORDER BY e.episode_id";

pub(crate) const LAST_ATTEMPT: &str =
    "SELECT COALESCE(MAX(attempt), 0) FROM attempts WHERE episode_id = $1";
pub(crate) const INSERT_ATTEMPT: &str = "INSERT INTO attempts \
     (attempt_id, episode_id, attempt, state, epoch, opened_us) \
     VALUES ($1, $2, $3, 'intended', $4, $5)";
/// The newest attempts of open episodes, where they are lost.
pub(crate) const SELECT_LOST: &str = "SELECT a.attempt_id FROM attempts a \
     JOIN episodes e ON e.episode_id = a.episode_id \
     WHERE e.state = 'open' AND a.state = 'lost' AND a.attempt = \
     (SELECT MAX(b.attempt) FROM attempts b WHERE b.episode_id = a.episode_id) \
     ORDER BY a.attempt_id";
pub(crate) const RESUME_ATTEMPT: &str = "UPDATE attempts SET state = 'intended', epoch = $2, \
     closed_us = NULL WHERE attempt_id = $1 AND state = 'lost' \
     AND attempt = (SELECT MAX(b.attempt) FROM attempts b WHERE b.episode_id = attempts.episode_id) \
     AND episode_id IN (SELECT episode_id FROM episodes WHERE state = 'open')";
pub(crate) const CLOSE_ATTEMPT: &str = "UPDATE attempts SET state = $2, outcome = $3, \
     summary = $4, blob = $5, blob_bytes = $6, epoch = $7, closed_us = $8 \
     WHERE attempt_id = $1 AND state = 'intended'";
/// Attempts that broke since this coordinator started; those of earlier epochs do not count.
pub(crate) const COUNT_BROKEN: &str =
    "SELECT COUNT(*) FROM attempts WHERE episode_id = $1 AND state = 'broken' AND epoch = $2";
pub(crate) const SELECT_ATTEMPTS: &str = "SELECT attempt_id, state, outcome, summary, blob, \
     blob_bytes, opened_us, closed_us FROM attempts WHERE episode_id = $1 ORDER BY attempt";
pub(crate) const SELECT_SEALED: &str = "SELECT a.attempt_id, a.state, a.outcome, a.summary, \
     a.blob, a.blob_bytes, a.opened_us, a.closed_us FROM attempts a \
     JOIN episodes e ON e.episode_id = a.episode_id \
     WHERE e.group_id = $1 AND a.state = 'sealed' ORDER BY e.member";
/// `$1` is a step of training, or NULL for all episodes. An episode without an attempt has one row.
pub(crate) const SELECT_NEWEST: &str = "SELECT e.episode_id, e.state, g.task_id, a.attempt_id, a.state, \
     a.outcome, a.summary FROM episodes e JOIN groups g ON g.group_id = e.group_id \
     LEFT JOIN attempts a ON a.episode_id = e.episode_id \
     WHERE $1 IS NULL OR (g.kind = 'train' AND g.step = $1) \
     ORDER BY COALESCE(a.closed_us, a.opened_us, g.opened_us) DESC, e.episode_id DESC LIMIT $2";
/// Outcomes of attempts that count in a stage.
pub(crate) const SELECT_OUTCOMES: &str = "SELECT a.outcome FROM attempts a \
     JOIN episodes e ON e.episode_id = a.episode_id JOIN groups g ON g.group_id = e.group_id \
     WHERE g.kind = $1 AND g.step = $2 AND a.state IN ('sealed', 'broken') ORDER BY a.attempt_id";
pub(crate) const COUNT_ATTEMPTS_OF_STEP: &str = "SELECT COUNT(*) FROM attempts a \
     JOIN episodes e ON e.episode_id = a.episode_id JOIN groups g ON g.group_id = e.group_id \
     WHERE g.kind = $1 AND g.step = $2 AND a.state = $3";

pub(crate) const INSERT_VERSION: &str = "INSERT INTO policy_versions \
     (version, lineage, checkpoint, state, epoch, announced_us) \
     VALUES ($1, $2, $3, 'announced', $4, $5) ON CONFLICT (version) DO UPDATE SET \
     lineage = excluded.lineage, checkpoint = excluded.checkpoint, state = 'announced', \
     epoch = excluded.epoch";
pub(crate) const VERSION_LIVE: &str =
    "UPDATE policy_versions SET state = 'live', epoch = $2, live_us = $3 WHERE version = $1";
pub(crate) const SELECT_VERSIONS: &str =
    "SELECT version, lineage, checkpoint, state FROM policy_versions ORDER BY version";

pub(crate) const INSERT_STEP: &str = "INSERT INTO steps \
     (step, step_id, state, base_version, epoch, opened_us) \
     VALUES ($1, $2, 'sampling', $3, $4, $5) ON CONFLICT (step) DO NOTHING";
pub(crate) const SELECT_STEP: &str = "SELECT step, step_id, state, base_version, result, \
     metrics, reason FROM steps WHERE step = $1";
pub(crate) const SELECT_STEPS: &str = "SELECT step, step_id, state, base_version, result, \
     metrics, reason FROM steps ORDER BY step";
pub(crate) const STEP_BASE: &str = "UPDATE steps SET base_version = $2, epoch = $3 \
     WHERE step = $1 AND state = 'sampling'";
pub(crate) const STEP_TRAINING: &str =
    "UPDATE steps SET state = 'training', epoch = $2 WHERE step = $1 AND state = 'sampling'";
pub(crate) const STEP_TRAINED: &str = "UPDATE steps SET state = 'trained', result = $2, \
     epoch = $3 WHERE step = $1 AND state IN ('training', 'trained')";
pub(crate) const STEP_APPLIED: &str = "UPDATE steps SET state = 'applied', metrics = $2, \
     epoch = $3, closed_us = $4 WHERE step = $1 AND state = 'trained'";
pub(crate) const STEP_SKIPPED: &str = "UPDATE steps SET state = 'skipped', metrics = $2, \
     reason = $3, epoch = $4, closed_us = $5 WHERE step = $1 AND state = 'sampling'";

pub(crate) const INSERT_BATCH: &str = "INSERT INTO batches \
     (step, state, folder, epoch, opened_us) VALUES ($1, 'assembling', $2, $3, $4) \
     ON CONFLICT (step) DO UPDATE SET folder = excluded.folder, epoch = excluded.epoch \
     WHERE batches.state = 'assembling'";
pub(crate) const CLEAR_MEMBERS: &str = "DELETE FROM batch_members WHERE step = $1";
pub(crate) const INSERT_MEMBER: &str = "INSERT INTO batch_members \
     (episode_id, step, position, advantage, epoch) VALUES ($1, $2, $3, $4, $5)";
pub(crate) const PUBLISH_BATCH: &str = "UPDATE batches SET state = 'published', digest = $2, \
     epoch = $3, published_us = $4 WHERE step = $1 AND state = 'assembling'";
pub(crate) const SET_BATCH_STATE: &str =
    "UPDATE batches SET state = $2, epoch = $3 WHERE step = $1 AND state = $4";
pub(crate) const SELECT_BATCHES: &str =
    "SELECT step, state, folder, digest FROM batches ORDER BY step";
pub(crate) const SELECT_MEMBERS: &str = "SELECT episode_id, advantage FROM batch_members \
     WHERE step = $1 ORDER BY position";

pub(crate) const INSERT_EVAL: &str = "INSERT INTO evals \
     (round, policy_version, state, epoch, opened_us) VALUES ($1, $2, 'running', $3, $4) \
     ON CONFLICT (round) DO NOTHING";
pub(crate) const FINISH_EVAL: &str = "UPDATE evals SET state = 'done', metrics = $2, \
     epoch = $3, closed_us = $4 WHERE round = $1 AND state = 'running'";
pub(crate) const SELECT_EVALS: &str =
    "SELECT round, policy_version, state, metrics FROM evals ORDER BY round";

/// All statements, so that a test can prepare each against the migrated schema.
#[cfg(test)]
pub(crate) const ALL: &[&str] = &[
    CHECK_EPOCH,
    INSERT_RUN,
    SELECT_RUN,
    NEXT_EPOCH,
    LOSE_ATTEMPTS,
    REOPEN_QUARANTINED,
    NAMED_BLOBS,
    INSERT_GROUP,
    INSERT_EPISODE,
    DECIDE_GROUP,
    SELECT_GROUP,
    SELECT_GROUPS,
    COUNT_TRAIN_GROUPS,
    SELECT_EPISODE_STATE,
    SET_EPISODE_STATE,
    SELECT_EPISODES,
    SELECT_ALL_EPISODES,
    LAST_ATTEMPT,
    INSERT_ATTEMPT,
    SELECT_LOST,
    RESUME_ATTEMPT,
    CLOSE_ATTEMPT,
    COUNT_BROKEN,
    SELECT_ATTEMPTS,
    SELECT_SEALED,
    COUNT_ATTEMPTS_OF_STEP,
    SELECT_OUTCOMES,
    INSERT_VERSION,
    VERSION_LIVE,
    SELECT_VERSIONS,
    INSERT_STEP,
    SELECT_STEP,
    SELECT_STEPS,
    STEP_BASE,
    STEP_TRAINING,
    STEP_TRAINED,
    STEP_APPLIED,
    STEP_SKIPPED,
    INSERT_BATCH,
    CLEAR_MEMBERS,
    INSERT_MEMBER,
    PUBLISH_BATCH,
    SET_BATCH_STATE,
    SELECT_BATCHES,
    SELECT_MEMBERS,
    INSERT_EVAL,
    FINISH_EVAL,
    SELECT_EVALS,
    INSERT_IMAGE,
    SELECT_IMAGE,
    SELECT_IMAGES,
    INSERT_AMENDMENT,
    SELECT_AMENDMENTS,
    HAS_BEGUN,
    SELECT_NEWEST,
];
