/* Writes from a buffer whose second part the program cannot read yet. So a SIGSEGV handler interrupts the copy in the middle of a
   page, uses the same file, and lets the copy continue. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define PAGE 4096
#define CHECK(condition)                                                                  \
    do {                                                                                  \
        if (!(condition)) {                                                               \
            fprintf(stderr, "line %d, round %d: not true: %s\n", __LINE__, round_, #condition); \
            _exit(1);                                                                     \
        }                                                                                 \
    } while (0)

static int fd, round_, handled;
static char *trap; /* PAGES pages. Only the first is readable until the handler runs. */
#define PAGES 8
static void (*in_handler)(void);
static sigjmp_buf away;

static void handler(int signal) {
    (void)signal;
    handled++;
    CHECK(mprotect(trap, PAGES * PAGE, PROT_READ | PROT_WRITE) == 0);
    in_handler();
}

/* Returns a buffer of `len` bytes for a write that is interrupted once the first `half` bytes are copied. */
static char *trapped(size_t len, size_t half, char byte) {
    CHECK(mprotect(trap, PAGES * PAGE, PROT_READ | PROT_WRITE) == 0);
    memset(trap, byte, PAGES * PAGE);
    CHECK(mprotect(trap + PAGE, (PAGES - 1) * PAGE, PROT_NONE) == 0);
    CHECK(half <= PAGE && len - half <= (PAGES - 1) * PAGE);
    return trap + PAGE - half;
}

/* Repeats a write until it is interrupted. A write through the kernel is not interrupted: it fails, or ends before the unreadable
   bytes. Before each attempt, `again` restores the file and the descriptor's offset. */
#define TRIES 1000
#define INTERRUPTED(write_call, len, again)                                               \
    do {                                                                                  \
        int before = handled, tries = 0;                                                  \
        ssize_t n;                                                                        \
        do {                                                                              \
            again;                                                                        \
            n = (write_call);                                                             \
        } while (handled == before && ++tries < TRIES);                                   \
        CHECK(handled == before + 1);                                                     \
        CHECK(n == (len));                                                                \
    } while (0)

static char old[PAGES * PAGE];
static void restore(void) { CHECK(pwrite(fd, old, sizeof old, 0) == sizeof old); }

static void all(long from, long to, char byte) {
    char bytes[PAGES * PAGE];
    CHECK(pread(fd, bytes, to - from, from) == to - from);
    for (long i = 0; i < to - from; i++) CHECK(bytes[i] == byte);
}

static void same_page(void) {
    char bytes[100];
    CHECK(pread(fd, bytes, 100, 3900) == 100);
    for (int i = 0; i < 100; i++) CHECK(bytes[i] == 'o');
    CHECK(pwrite(fd, "hhhh", 4, 100) == 4);  /* Bytes that are copied already. */
    CHECK(pwrite(fd, "hhhh", 4, 1900) == 4); /* Bytes that are not copied yet. */
    CHECK(pwrite(fd, "hhhh", 4, 3000) == 4); /* Bytes beyond the write. */
    CHECK(pread(fd, bytes, 4, 100) == 4 && memcmp(bytes, "hhhh", 4) == 0);
}

static void by_another_descriptor(void) {
    int other = open("file", O_RDWR);
    char bytes[4];
    CHECK(other >= 0 && read(other, bytes, 4) == 4 && write(other, "hhhh", 4) == 4);
    CHECK(lseek(other, 0, SEEK_CUR) == 8 && close(other) == 0);
    int copy = dup(fd);
    CHECK(copy >= 0 && pread(copy, bytes, 4, 4) == 4 && memcmp(bytes, "hhhh", 4) == 0 && close(copy) == 0);
}

static void several_pages(void) {
    char bytes[5 * PAGE];
    memset(bytes, 'h', sizeof bytes);
    CHECK(pwrite(fd, bytes, sizeof bytes, 2000) == sizeof bytes);
    CHECK(pread(fd, bytes, sizeof bytes, 1000) == sizeof bytes);
    CHECK(bytes[1000] == 'h' && bytes[sizeof bytes - 1] == 'h');
}

static int log_fd;
/* Extends the log and returns its size. The kernel may still know an older size. */
static long lengthen(void) {
    CHECK(write(log_fd, old, 3 * PAGE) == 3 * PAGE);
    return lseek(log_fd, 0, SEEK_END);
}

static void line(void) { CHECK(write(log_fd, "handler\n", 8) == 8); }

static void synced(void) { CHECK(fsync(fd) == 0 && fdatasync(fd) == 0 && fsync(log_fd) == 0); }

static void truncated(void) { CHECK(ftruncate(fd, 500) == 0 && lseek(fd, 0, SEEK_END) == 500); }

static void log_synced(void) { CHECK(fsync(log_fd) == 0 && syscall(SYS_fdatasync, log_fd) == 0); }

static void log_truncated(void) { CHECK(ftruncate(log_fd, 4) == 0); }

static void allocated(void) {
    CHECK(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, PAGE) == 0);
    CHECK(fallocate(fd, FALLOC_FL_ZERO_RANGE, 1500, 2000) == 0);
    CHECK(posix_fallocate(fd, 0, PAGES * PAGE) == 0);
}

static void log_allocated(void) {
    CHECK(fallocate(log_fd, FALLOC_FL_KEEP_SIZE, 0, 1 << 20) == 0);
    CHECK(posix_fallocate(log_fd, 0, 4) == 0);
    CHECK(syscall(SYS_fallocate, log_fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0L, 1L << 20) == 0);
}

static void volume_synced(void) { CHECK(syncfs(fd) == 0); }

static void everything_synced(void) { sync(); }

static void truncated_by_name(void) {
    CHECK(truncate("file", 500) == 0 && lseek(fd, 0, SEEK_END) == 500);
    CHECK(close(open("file", O_WRONLY | O_TRUNC)) == 0);
    CHECK(lseek(fd, 0, SEEK_END) == 0);
}

static void leave(void) { siglongjmp(away, 1); }

int main(int argc, char **argv) {
    int rounds = argc > 1 ? atoi(argv[1]) : 1;
    trap = mmap(NULL, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(trap != MAP_FAILED);
    struct sigaction action = {.sa_handler = handler, .sa_flags = SA_NODEFER};
    CHECK(sigaction(SIGSEGV, &action, NULL) == 0);
    memset(old, 'o', sizeof old);
    fd = open("file", O_RDWR | O_CREAT | O_TRUNC, 0644);
    log_fd = open("log", O_RDWR | O_CREAT | O_TRUNC | O_APPEND, 0644);
    CHECK(fd >= 0 && log_fd >= 0);
    /* The first calls go through the kernel. */
    for (int i = 0; i < 100; i++) CHECK(pread(fd, old, 1, 0) == 0 && pread(log_fd, old, 1, 0) == 0);
    CHECK(write(log_fd, "begin--\n", 8) == 8);
    for (round_ = 0; round_ < rounds; round_++) {
        handled = 0;
        in_handler = same_page;
        INTERRUPTED(pwrite(fd, trapped(2000, 1000, 'w'), 2000, 0), 2000, restore());
        all(0, 2000, 'w');
        all(2000, 3000, 'o');
        all(3000, 3004, 'h');

        in_handler = by_another_descriptor;
        INTERRUPTED(write(fd, trapped(2000, 1000, 'w'), 2000), 2000, (restore(), lseek(fd, 0, SEEK_SET)));
        CHECK(lseek(fd, 0, SEEK_CUR) == 2000);
        all(0, 2000, 'w');

        in_handler = several_pages;
        INTERRUPTED(pwrite(fd, trapped(3 * PAGE, 3000, 'w'), 3 * PAGE, PAGE), 3 * PAGE, restore());
        all(0, 2000, 'o');
        all(2000, PAGE, 'h');
        all(PAGE, 4 * PAGE, 'w');
        all(4 * PAGE, 2000 + 5 * PAGE, 'h');

        /* The log holds each line once and whole. */
        in_handler = line;
        long end = 0;
        INTERRUPTED(write(log_fd, trapped(3000, 1500, 'w'), 3000), 3000, end = lengthen());
        char text[3008];
        CHECK(pread(log_fd, text, sizeof text, end) == sizeof text);
        CHECK(lseek(log_fd, 0, SEEK_END) == end + 3008);
        int at = 0, lines = 0;
        while (at < 3008) {
            if (text[at] == 'h') {
                CHECK(memcmp(text + at, "handler\n", 8) == 0);
                at += 8;
                lines++;
            } else {
                for (int i = 0; i < 3000; i++) CHECK(text[at + i] == 'w');
                at += 3000;
            }
        }
        CHECK(lines == 1);
        CHECK(handled == 4);

        in_handler = synced;
        INTERRUPTED(pwrite(fd, trapped(2000, 1000, 'w'), 2000, 0), 2000, restore());
        all(0, 2000, 'w');

        in_handler = log_synced;
        INTERRUPTED(write(log_fd, trapped(3000, 1500, 'w'), 3000), 3000, end = lengthen());
        CHECK(pread(log_fd, text, sizeof text, end) == 3000);
        for (int i = 0; i < 3000; i++) CHECK(text[i] == 'w');

        /* The write takes effect after the truncation, wherever the handler interrupted it. */
        in_handler = truncated;
        INTERRUPTED(pwrite(fd, trapped(2000, 1000, 'w'), 2000, 0), 2000, restore());
        CHECK(lseek(fd, 0, SEEK_END) == 2000);
        all(0, 2000, 'w');
        restore();

        in_handler = log_truncated;
        INTERRUPTED(write(log_fd, trapped(3000, 1500, 'w'), 3000), 3000, end = lengthen());
        CHECK(lseek(log_fd, 0, SEEK_END) == 3004 && pread(log_fd, text, sizeof text, 4) == 3000);
        for (int i = 0; i < 3000; i++) CHECK(text[i] == 'w');
        CHECK(handled == 8);

        in_handler = allocated;
        INTERRUPTED(pwrite(fd, trapped(2000, 1000, 'w'), 2000, 0), 2000, restore());
        all(0, 2000, 'w');
        all(2000, PAGE, 0);
        all(PAGE, 2 * PAGE, 'o');

        in_handler = log_allocated;
        INTERRUPTED(write(log_fd, trapped(3000, 1500, 'w'), 3000), 3000, end = lengthen());
        CHECK(lseek(log_fd, 0, SEEK_END) == end + 3000);
        CHECK(pread(log_fd, text, sizeof text, end) == 3000);
        for (int i = 0; i < 3000; i++) CHECK(text[i] == 'w');

        in_handler = truncated_by_name;
        INTERRUPTED(pwrite(fd, trapped(2000, 1000, 'w'), 2000, 0), 2000, restore());
        CHECK(lseek(fd, 0, SEEK_END) == 2000);
        all(0, 2000, 'w');
        restore();

        in_handler = volume_synced;
        INTERRUPTED(pwrite(fd, trapped(2000, 1000, 'w'), 2000, 0), 2000, restore());
        all(0, 2000, 'w');
        CHECK(handled == 12);
    }
    /* Only once, because the call writes back all dirty data of the machine. */
    in_handler = everything_synced;
    INTERRUPTED(pwrite(fd, trapped(2000, 1000, 'w'), 2000, 0), 2000, restore());
    all(0, 2000, 'w');
    /* A handler that does not return leaves its thread without the fast path. The thread's next use of the file ends the interrupted
       write. */
    in_handler = leave;
    if (sigsetjmp(away, 1) == 0) INTERRUPTED(pwrite(fd, trapped(2000, 1000, 'w'), 2000, 0), -1, (void)0);
    CHECK(pwrite(fd, "after", 5, 10) == 5);
    char after[5];
    CHECK(pread(fd, after, 5, 10) == 5 && memcmp(after, "after", 5) == 0);
    all(2000, PAGE, 'o');
    CHECK(fsync(fd) == 0 && fsync(log_fd) == 0);
    puts("interrupted");
    return 0;
}
