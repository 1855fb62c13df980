/* A closed fd refers to the file that is opened next, after each way to close it. */
#include "check.h"
#include <dirent.h>
#include <linux/close_range.h>
#include <sys/socket.h>
#include <sys/syscall.h>

int __close(int);

static void with_close(int fd) { SUCCEEDS(close(fd)); }
static void with_alias(int fd) { SUCCEEDS(__close(fd)); }
static void with_range(int fd) { SUCCEEDS(close_range(fd, fd, 0)); }
static void with_long_range(int fd) { SUCCEEDS(close_range(fd, ~0u, 0)); }
static void with_closefrom(int fd) { closefrom(fd); }
static void with_syscall(int fd) { SUCCEEDS(syscall(SYS_close, fd)); }
static void with_raw_range(int fd) { SUCCEEDS(syscall(SYS_close_range, fd, fd, 0)); }
static void with_stream(int fd) {
    FILE *file = fdopen(fd, "r");
    CHECK(file && fclose(file) == 0);
}

static char a[4096], b[4096];

static void holds(int fd, const char *what) {
    char found[4096];
    CHECK(pread(fd, found, sizeof found, 0) == sizeof found);
    CHECK(memcmp(found, what, sizeof found) == 0);
    CHECK(lseek(fd, 0, SEEK_CUR) == 0);
    CHECK(read(fd, found, sizeof found) == sizeof found);
    CHECK(memcmp(found, what, sizeof found) == 0);
}

static void make(const char *name, const char *what) {
    int fd = open(name, O_WRONLY | O_CREAT, 0600);
    CHECK(fd >= 0 && write(fd, what, 4096) == 4096 && close(fd) == 0);
}

int main(int argc, char **argv) {
    BEGIN;
    memset(a, 'a', sizeof a);
    memset(b, 'b', sizeof b);
    make("a", a);
    make("b", b);
    void (*ways[])(int) = {with_close,     with_alias,   with_range,     with_long_range,
                           with_closefrom, with_syscall, with_raw_range, with_stream};
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        int fd = open("a", O_RDONLY);
        CHECK(fd > 2);
        holds(fd, a);
        ways[i](fd);
        FAILS(read(fd, (char[1]){0}, 1), EBADF);
        FAILS(lseek(fd, 0, SEEK_CUR), EBADF);
        CHECK(open("b", O_RDONLY) == fd);
        holds(fd, b);
        ways[i](fd);
        /* An fd that is no file. */
        int ends[2];
        CHECK(pipe(ends) == 0 && ends[0] == fd);
        CHECK(write(ends[1], "pipe", 4) == 4);
        char four[4];
        CHECK(read(fd, four, 4) == 4 && memcmp(four, "pipe", 4) == 0);
        CHECK(close(ends[1]) == 0);
        ways[i](fd);
        CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0 && ends[0] == fd);
        CHECK(write(ends[1], "sock", 4) == 4);
        CHECK(read(fd, four, 4) == 4 && memcmp(four, "sock", 4) == 0);
        CHECK(close(ends[1]) == 0);
        ways[i](fd);
        /* A directory, which the C library closes itself. */
        CHECK(open(".", O_RDONLY | O_DIRECTORY) == fd);
        DIR *directory = fdopendir(fd);
        CHECK(directory && readdir(directory) && closedir(directory) == 0);
        CHECK(open("a", O_RDONLY) == fd);
        holds(fd, a);
        ways[i](fd);
        CHECK(fopen("b", "r"));
        CHECK(lseek(fd, 0, SEEK_CUR) == 0);
        holds(fd, b);
        ways[i](fd);
    }
    /* Closed only at exec, so it is still open. */
    int fd = open("a", O_RDONLY);
    holds(fd, a);
    SUCCEEDS(close_range(fd, ~0u, CLOSE_RANGE_CLOEXEC));
    CHECK(lseek(fd, 0, SEEK_SET) == 0);
    holds(fd, a);
    FAILS(close(99), EBADF);
    FAILS(close(-1), EBADF);
    FAILS(close_range(5, 4, 0), EINVAL);
    CHECK(lseek(fd, 0, SEEK_SET) == 0);
    holds(fd, a);
    done("closing");
    return 0;
}
