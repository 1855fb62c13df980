//! Programs that are too large to install for every `make test`: a Java virtual machine and PostgreSQL. `make programs` runs them.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use crate::again;
use crate::program::{succeed, within_limit};
use crate::same::behaves_the_same;

/// Uses the class library's operations on files: streams, channels, positions, mappings and child processes.
const JAVA: &str = r#"
import java.io.*;
import java.nio.*;
import java.nio.channels.*;
import java.nio.file.*;
import java.nio.file.attribute.*;
import java.security.MessageDigest;
import java.util.*;
import java.util.stream.*;
import java.util.zip.*;

public class Files1 {
    static String digest(Path path) throws Exception {
        byte[] sum = MessageDigest.getInstance("SHA-256").digest(Files.readAllBytes(path));
        return HexFormat.of().formatHex(sum).substring(0, 16);
    }

    public static void main(String[] arguments) throws Exception {
        Random random = new Random(42);
        byte[] data = new byte[3_000_000];
        random.nextBytes(data);
        Path file = Path.of("f");
        try (OutputStream out = new BufferedOutputStream(new FileOutputStream("f"), 5000)) {
            for (int at = 0; at < data.length; at += 777) out.write(data, at, Math.min(777, data.length - at));
        }
        System.out.println(Files.size(file) + " " + digest(file));

        try (RandomAccessFile access = new RandomAccessFile("f", "rw")) {
            long sum = 0;
            for (int n = 0; n < 3000; n++) {
                access.seek(random.nextInt(data.length));
                if (n % 3 == 0) access.writeLong(random.nextLong());
                else sum += access.read();
            }
            access.setLength(2_500_001);
            System.out.println(sum + " " + access.length() + " " + access.getFilePointer());
        }
        try (FileChannel channel = FileChannel.open(file, StandardOpenOption.READ, StandardOpenOption.WRITE)) {
            ByteBuffer direct = ByteBuffer.allocateDirect(10_000), small = ByteBuffer.allocate(33);
            System.out.println(channel.read(new ByteBuffer[] {small, direct}) + " " + channel.position());
            direct.flip();
            System.out.println(channel.write(direct, 2_495_000) + " " + channel.size() + " " + channel.position());
            MappedByteBuffer map = channel.map(FileChannel.MapMode.READ_WRITE, 4096, 100_000);
            map.putInt(10, 0xcafe);
            map.force();
            ByteBuffer four = ByteBuffer.allocate(4);
            channel.read(four, 4106);
            System.out.println(Integer.toHexString(four.getInt(0)));
            try (FileChannel other = FileChannel.open(Path.of("g"), StandardOpenOption.CREATE, StandardOpenOption.WRITE)) {
                System.out.println(channel.transferTo(100, 1_000_000, other) + " " + other.size());
            }
            channel.truncate(2_000_000);
            try (FileLock lock = channel.lock()) { System.out.println(lock.isValid()); }
        }
        System.out.println(digest(file) + " " + digest(Path.of("g")));

        try (Writer log = new FileWriter("log", true)) { for (int n = 0; n < 5000; n++) log.write("line " + n + "\n"); }
        Process process = new ProcessBuilder("sh", "-c", "cat; echo from a child")
            .redirectInput(new File("log")).redirectOutput(ProcessBuilder.Redirect.appendTo(new File("log2"))).start();
        System.out.println(process.waitFor());
        try (Stream<String> lines = Files.lines(Path.of("log2"))) { System.out.println(lines.count()); }
        try (OutputStream out = new GZIPOutputStream(new FileOutputStream("z"))) { Files.copy(file, out); }
        try (InputStream in = new GZIPInputStream(new FileInputStream("z"))) { System.out.println(in.transferTo(OutputStream.nullOutputStream())); }
        Files.createDirectories(Path.of("d/e"));
        IntStream.range(0, 500).parallel().forEach(n -> {
            try { Files.writeString(Path.of("d/e/" + n), "content " + n); Files.move(Path.of("d/e/" + n), Path.of("d/" + n)); }
            catch (IOException e) { throw new UncheckedIOException(e); }
        });
        try (Stream<Path> all = Files.walk(Path.of("d"))) { System.out.println(all.mapToLong(p -> p.toFile().length() % 4096 % 13).count()); }
        Files.copy(Path.of("g"), Path.of("h"), StandardCopyOption.COPY_ATTRIBUTES);
        System.out.println(Files.mismatch(Path.of("g"), Path.of("h")));
        try { new FileInputStream("none"); } catch (FileNotFoundException e) { System.out.println(e.getMessage()); }
    }
}
"#;

#[test]
#[ignore = "needs a Java development kit: make programs"]
fn a_java_program_is_compiled_and_runs_the_same() {
    let script = format!(
        "cat > Files1.java <<'END'\n{JAVA}\nEND\n\
         javac -d classes Files1.java\n\
         java -Xshare:auto -Xmx256m -cp classes Files1\n\
         (cd classes && jar --create --date=2024-01-01T00:00:00Z --file ../files.jar Files1.class)\n\
         mkdir again && cd again && java -Xmx256m -cp ../files.jar Files1"
    );
    behaves_the_same("64M", &script);
}

/// A script for a directory with `jericho` and its library. It runs as an ordinary user.
const POSTGRES: &str = r#"
PATH=$(ls -d /usr/lib/postgresql/*/bin | sort -V | tail -n 1):$PATH
mkdir mnt socket
./jericho format vol --size 1G --slices 2
./jericho mount vol mnt --cache 32M --topology virtual:2
trap 'tail -n 30 log; pg_ctl -D mnt/data -m immediate stop >&- 2>&- || true; ./jericho umount mnt || fusermount3 -uz mnt' EXIT
export PGHOST=$PWD/socket PGUSER=postgres PGDATABASE=postgres
ask() { psql -qAtc "$1"; }
sums() {
    ask "SELECT (SELECT sum(abalance) FROM pgbench_accounts), (SELECT sum(tbalance) FROM pgbench_tellers),
        (SELECT sum(bbalance) FROM pgbench_branches), (SELECT coalesce(sum(delta), 0) FROM pgbench_history)"
}
assert_consistent() {
    [ "$(sums | tr '|' '\n' | sort -u | wc -l)" = 1 ] || { echo "the balances differ: $(sums)"; exit 1; }
}
start() {
    ./jericho run -- pg_ctl -w -t 120 -D mnt/data -l log start >&-
    grep -q libjericho_preload "/proc/$(head -n 1 mnt/data/postmaster.pid)/maps"
}
./jericho run -- initdb -k -U postgres -A trust -D mnt/data > initdb.log
cat >> mnt/data/postgresql.conf <<END
listen_addresses = ''
unix_socket_directories = '$PWD/socket'
# The buffers are small, so that PostgreSQL reads pages from the files and writes them back all the time.
shared_buffers = 2MB
max_wal_size = 64MB
checkpoint_timeout = 30s
END
start
./jericho run -- pgbench -q -i -s 1 --foreign-keys 2> load.log
[ "$(ask 'SELECT count(*) FROM pgbench_accounts')" = 100000 ]
pgbench -n -c 4 -t 500 > bench.log
grep -q 'actually processed: 2000/2000' bench.log
assert_consistent
ask 'CHECKPOINT'
ask 'VACUUM FULL pgbench_accounts'
for round in 1 2 3; do
    before=$(ask 'SELECT count(*) FROM pgbench_history')
    pgbench -n -c 4 -T 600 > crash.log 2>&1 &
    client=$!
    # Waits for 300 transactions, so that the kill hits the server in the middle of its work.
    while [ "$(ask 'SELECT count(*) FROM pgbench_history')" -lt $((before + 300)) ]; do :; done
    acknowledged=$(ask 'SELECT count(*) FROM pgbench_history')
    server=$(head -n 1 mnt/data/postmaster.pid)
    children=$(ps -o pid= --ppid "$server")
    kill -KILL "$server" $children
    wait $client || true
    for pid in $server $children; do tail --pid "$pid" -f /dev/null; done
    start
    [ "$(ask 'SELECT count(*) FROM pgbench_history')" -ge "$acknowledged" ]
    assert_consistent
done
grep -q 'automatic recovery in progress' log
final=$(sums)
pg_ctl -D mnt/data -m fast -w stop >&-
./jericho run -- pg_checksums --check -D mnt/data | grep 'Bad checksums:  *0'
./jericho umount mnt
./jericho check vol
./jericho mount vol mnt --cache 32M
pg_checksums --check -D mnt/data | grep 'Bad checksums:  *0'
start
[ "$(sums)" = "$final" ]
./jericho run -- pg_dump -Fc -f mnt/dump postgres && pg_restore -l mnt/dump | grep -q 'TABLE DATA public pgbench_accounts'
pg_ctl -D mnt/data -m fast -w stop >&-
./jericho umount mnt
./jericho check vol
trap - EXIT
echo all done
"#;

/// Runs the script as `nobody`, with a /dev/fuse that all users may open, as on an ordinary machine. PostgreSQL refuses to run as
/// root, and only programs of the user who mounted a volume access its pages inline.
const AS_NOBODY: &str = "
    mkdir dev && mount -t tmpfs none dev && mknod -m 666 dev/fuse c 10 229
    mount --bind dev/fuse /dev/fuse
    exec setpriv --reuid 65534 --regid 65534 --clear-groups sh -euc \"$SCRIPT\"";

fn copy_command_and_library(to: &Path) {
    let jericho = Path::new(again::run_prefix()[0]);
    std::fs::copy(jericho, to.join("jericho")).expect("the command is copied");
    let library = "libjericho_preload.so";
    std::fs::copy(jericho.with_file_name(library), to.join(library))
        .unwrap_or_else(|e| panic!("{library} beside {}: {e}", jericho.display()));
}

#[test]
#[ignore = "needs PostgreSQL: make programs"]
fn postgresql_recovers_from_kills_with_its_data_on_a_mount() {
    // The temporary directory is open to other users. The build directory may not be.
    let dir = tempfile::tempdir().expect("a directory");
    let all = std::fs::Permissions::from_mode(0o777);
    std::fs::set_permissions(dir.path(), all).expect("chmod");
    copy_command_and_library(dir.path());
    let mut command = if rustix::process::geteuid().is_root() {
        let mut command: Command = within_limit("unshare");
        command.args(["--mount", "--propagation", "private"]);
        command.args(["sh", "-euc", AS_NOBODY]);
        command
    } else {
        let mut command = within_limit("sh");
        command.args(["-euc", POSTGRES]);
        command
    };
    command
        .current_dir(dir.path())
        .env("HOME", dir.path())
        .env("SCRIPT", POSTGRES)
        .env_remove("XDG_STATE_HOME");
    let said = succeed(&mut command);
    assert!(said.ends_with("all done\n"), "{said}");
}
