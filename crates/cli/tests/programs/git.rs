//! git: many small files, renames, hard links and locks.

use crate::program::shell_in;
use crate::volume::Volume;

#[test]
fn a_repository_is_committed_cloned_repacked_and_sound() {
    let volume = Volume::mounted("512M", 2, "16M");
    let dir = volume.make_dir("git");
    shell_in(
        &dir,
        "export GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_COUNT=1
         export GIT_CONFIG_KEY_0=safe.directory GIT_CONFIG_VALUE_0='*'
         export GIT_AUTHOR_NAME=t GIT_AUTHOR_EMAIL=t@localhost GIT_COMMITTER_NAME=t GIT_COMMITTER_EMAIL=t@localhost
         git init -q -b main repo
         cd repo
         for d in 1 2 3 4 5 6 7 8 9 10; do
             mkdir d$d
             for f in $(seq 50); do seq $((d * f)) > d$d/f$f; done
             git add .
             git commit -qm \"directory $d\"
         done
         git mv d1 moved
         git commit -qm 'a rename'
         git gc -q
         git clone -q . ../hard-linked
         git clone -q --no-local . ../copied
         git checkout -q HEAD~5
         git checkout -q main
         git -C ../hard-linked fsck --full --strict
         git -C ../copied fsck --full --strict",
    );
    volume.remount();
    shell_in(
        &dir,
        "export GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=safe.directory GIT_CONFIG_VALUE_0='*'
         git -C copied fsck --full --strict
         [ \"$(git -C copied status --porcelain | wc -l)\" = 0 ]
         [ \"$(git -C copied log --oneline | wc -l)\" = 11 ]
         diff -r --exclude=.git repo copied
         diff -r --exclude=.git repo hard-linked",
    );
    volume.finish();
}
