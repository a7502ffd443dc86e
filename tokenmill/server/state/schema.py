"""The tables of the state file. Each version is a script that migrates from the previous version; SQLite's
`user_version` is the version of a file. Released scripts are never changed: a change is a new script at the end.

    responses ──< items >── conversations          files ──── batches ──< batch_lines

Every row that clients can access has `owner`: the id of the API key that created it ("" if the server has no keys).
`used_s` is the time of its last use: the least recently used rows are deleted first. `expires_s` is NULL for rows that
do not expire. `server` is the process that works on the row (see instance.py). Times are seconds since 1970.
"""

from __future__ import annotations

VERSIONS = (
    """
    CREATE TABLE responses (
        id           TEXT PRIMARY KEY,
        owner        TEXT NOT NULL,
        created_s    REAL NOT NULL,
        used_s       REAL NOT NULL,
        expires_s    REAL,
        status       TEXT NOT NULL,      -- queued, in_progress, completed, incomplete, failed, cancelled
        server       TEXT,
        parent       TEXT,               -- the response that it continues
        conversation TEXT,
        request      BLOB NOT NULL,      -- the JSON body that asked for it: a queued one is run again after a restart
        body         BLOB NOT NULL,      -- JSON of the response, as GET shows it
        prefix       BLOB,               -- token ids of prompt and answer, for the prompt of a child to extend
        events       BLOB,               -- its stream, compressed, to be shown again
        num_bytes    INTEGER NOT NULL
    );
    CREATE INDEX responses_by_use ON responses (used_s, num_bytes);
    CREATE INDEX responses_by_expiry ON responses (expires_s) WHERE expires_s IS NOT NULL;
    CREATE INDEX responses_at_work ON responses (server) WHERE server IS NOT NULL;

    CREATE TABLE conversations (
        id           TEXT PRIMARY KEY,
        owner        TEXT NOT NULL,
        created_s    REAL NOT NULL,
        used_s       REAL NOT NULL,
        expires_s    REAL,
        metadata     BLOB NOT NULL,      -- JSON
        num_bytes    INTEGER NOT NULL    -- with its items
    );
    CREATE INDEX conversations_by_use ON conversations (used_s, num_bytes);

    CREATE TABLE items (
        holder       TEXT NOT NULL,      -- a response or a conversation
        seq          INTEGER NOT NULL,
        id           TEXT NOT NULL,
        owner        TEXT NOT NULL,
        side         TEXT NOT NULL,      -- of a response: input or output
        body         BLOB NOT NULL,      -- JSON
        PRIMARY KEY (holder, seq)
    ) WITHOUT ROWID;
    CREATE INDEX items_by_id ON items (id);
    CREATE TRIGGER response_gone AFTER DELETE ON responses
        BEGIN DELETE FROM items WHERE holder = OLD.id; END;
    CREATE TRIGGER conversation_gone AFTER DELETE ON conversations
        BEGIN DELETE FROM items WHERE holder = OLD.id; END;

    CREATE TABLE files (                 -- the content is a file of its own, named by the id
        id           TEXT PRIMARY KEY,
        owner        TEXT NOT NULL,
        created_s    REAL NOT NULL,
        used_s       REAL NOT NULL,
        expires_s    REAL,
        purpose      TEXT NOT NULL,
        name         TEXT NOT NULL,
        sha256       TEXT NOT NULL,
        num_bytes    INTEGER NOT NULL
    );
    CREATE INDEX files_by_use ON files (used_s, num_bytes);
    CREATE INDEX files_by_expiry ON files (expires_s) WHERE expires_s IS NOT NULL;

    CREATE TABLE batches (
        id           TEXT PRIMARY KEY,
        owner        TEXT NOT NULL,
        created_s    REAL NOT NULL,
        used_s       REAL NOT NULL,
        expires_s    REAL,
        dialect      TEXT NOT NULL,      -- openai or anthropic
        endpoint     TEXT NOT NULL,      -- the path that its lines are requests of
        input        TEXT NOT NULL,      -- the file with its lines
        status       TEXT NOT NULL,      -- validating, failed, in_progress, cancelling, finalizing, completed, ...
        server       TEXT,
        due_s        REAL NOT NULL,      -- what is not answered by then expires
        model        TEXT,
        num_lines    INTEGER NOT NULL DEFAULT 0,
        succeeded    INTEGER NOT NULL DEFAULT 0,      -- lines, by how they ended
        errored      INTEGER NOT NULL DEFAULT 0,
        canceled     INTEGER NOT NULL DEFAULT 0,
        expired      INTEGER NOT NULL DEFAULT 0,
        input_tokens INTEGER NOT NULL DEFAULT 0,
        cached_tokens INTEGER NOT NULL DEFAULT 0,
        output_tokens INTEGER NOT NULL DEFAULT 0,
        reasoning_tokens INTEGER NOT NULL DEFAULT 0,
        facts        BLOB NOT NULL,      -- JSON: metadata, when it came to each status, errors, files with its results
        num_bytes    INTEGER NOT NULL    -- of its lines
    );
    CREATE INDEX batches_by_use ON batches (used_s, num_bytes);
    CREATE INDEX batches_at_work ON batches (status);

    CREATE TABLE batch_lines (           -- a line that has ended; one that has not has no row
        batch        TEXT NOT NULL,
        line         INTEGER NOT NULL,
        custom_id    TEXT NOT NULL,
        state        TEXT NOT NULL,      -- succeeded, errored, canceled, expired
        result       BLOB NOT NULL,      -- JSON as its dialect writes it
        PRIMARY KEY (batch, line)
    ) WITHOUT ROWID;
    CREATE TRIGGER batch_gone AFTER DELETE ON batches
        BEGIN DELETE FROM batch_lines WHERE batch = OLD.id; END;
    """,
    """
    CREATE TABLE usage (                 -- a row a generation, however it ended
        time_s       REAL NOT NULL,
        request      TEXT NOT NULL,
        key          TEXT NOT NULL,      -- the id of the API key
        user         TEXT NOT NULL,      -- as the client named him
        model        TEXT NOT NULL,      -- empty: it was refused before it had one
        path         TEXT NOT NULL,
        status       INTEGER NOT NULL,
        outcome      TEXT NOT NULL,      -- stop, length, abort, error
        prompt_tokens     INTEGER NOT NULL,
        cached_tokens     INTEGER NOT NULL,
        completion_tokens INTEGER NOT NULL,
        reasoning_tokens  INTEGER NOT NULL,
        queue_s      REAL,
        first_token_s REAL,
        total_s      REAL NOT NULL
    );
    CREATE INDEX usage_by_time ON usage (time_s);
    CREATE INDEX usage_by_key ON usage (key, time_s);
    """,
    """
    ALTER TABLE usage ADD COLUMN device_s REAL NOT NULL DEFAULT 0;  -- of the engine's steps, the request's part
    """,
)
