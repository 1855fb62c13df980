//! sqlite3 with both kinds of journal.

use std::path::Path;

use crate::program::{command, run_in, succeed};
use crate::volume::Volume;

/// Runs SQL commands and returns the text that sqlite3 prints.
fn sqlite(db: &Path, sql: &str) -> String {
    succeed(command("sqlite3").arg("-bail").arg(db).arg(sql))
        .trim()
        .to_owned()
}

fn a_database_stays_whole(journal: &str) {
    let volume = Volume::mounted("512M", 2, "8M");
    let db = volume.make_dir("db").join("test.db");
    assert_eq!(
        sqlite(&db, &format!("PRAGMA journal_mode={journal}")),
        journal
    );
    sqlite(
        &db,
        "CREATE TABLE t(id INTEGER PRIMARY KEY, k TEXT UNIQUE, v BLOB)",
    );
    let insert = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x+1 FROM c WHERE x<1000)
        INSERT INTO t(k, v) SELECT hex(randomblob(8)), randomblob(400) FROM c";
    for _ in 0..20 {
        sqlite(&db, &format!("BEGIN; {insert}; COMMIT;"));
        sqlite(
            &db,
            &format!("BEGIN; {insert}; UPDATE t SET v=NULL; ROLLBACK;"),
        );
    }
    sqlite(&db, "DELETE FROM t WHERE id % 2 = 0; VACUUM");
    // The database is larger than the cache: 10,000 rows of 400 bytes and an index need more than 8 MiB of frames.
    volume.remount();
    assert_eq!(sqlite(&db, "PRAGMA integrity_check"), "ok");
    assert_eq!(
        sqlite(&db, "SELECT count(*), sum(length(v)) FROM t"),
        "10000|4000000"
    );
    volume.finish();
}

#[test]
fn a_database_with_a_rollback_journal_stays_whole() {
    a_database_stays_whole("delete");
}

#[test]
fn a_database_with_a_write_ahead_log_stays_whole() {
    a_database_stays_whole("wal");
}

#[test]
fn two_processes_that_write_one_database_wait_for_each_others_locks() {
    let volume = Volume::mounted("256M", 2, "32M");
    let dir = volume.make_dir("db");
    run_in(&dir, "sqlite3", &["t.db", "CREATE TABLE t(who INT, n INT)"]);
    std::thread::scope(|scope| {
        for who in 0..2 {
            let dir = &dir;
            scope.spawn(move || {
                for n in 0..50 {
                    let sql =
                        format!("PRAGMA busy_timeout=60000; INSERT INTO t VALUES({who}, {n})");
                    run_in(dir, "sqlite3", &["-bail", "t.db", &sql]);
                }
            });
        }
    });
    assert_eq!(
        run_in(&dir, "sqlite3", &["t.db", "SELECT count(*) FROM t"]).trim(),
        "100"
    );
    volume.finish();
}
