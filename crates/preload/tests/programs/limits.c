/* A limit of file sizes that is set after the files were opened, by each call that can set one. */
#include "check.h"
#include <signal.h>
#include <sys/resource.h>
#include <sys/syscall.h>

static int fd;
static volatile int told;

static void handler(int signal) { told += signal == SIGXFSZ; }

static void by_setrlimit(rlim_t to) {
    struct rlimit limit = {to, RLIM_INFINITY};
    SUCCEEDS(setrlimit(RLIMIT_FSIZE, &limit));
}

static void by_prlimit(rlim_t to) {
    struct rlimit limit = {to, RLIM_INFINITY};
    SUCCEEDS(prlimit(0, RLIMIT_FSIZE, &limit, NULL));
}

static void by_number(rlim_t to) {
    struct rlimit limit = {to, RLIM_INFINITY};
    SUCCEEDS(syscall(SYS_setrlimit, RLIMIT_FSIZE, &limit));
}

static void by_prlimits_number(rlim_t to) {
    struct rlimit limit = {to, RLIM_INFINITY};
    SUCCEEDS(syscall(SYS_prlimit64, getpid(), RLIMIT_FSIZE, &limit, NULL));
}

static void (*const ways[])(rlim_t) = {by_setrlimit, by_prlimit, by_number, by_prlimits_number};

/* Opens a file and extends it by writes of 100 bytes until the fd is inline. Returns the size of the file. */
static long warm(const char *name, int flags) {
    char bytes[100];
    memset(bytes, 'b', sizeof bytes);
    fd = open(name, O_RDWR | O_CREAT | O_TRUNC | flags, 0600);
    CHECK(fd >= 0);
    for (int i = 0; i < 200; i++) CHECK(write(fd, bytes, sizeof bytes) == sizeof bytes);
    return lseek(fd, 0, SEEK_END);
}

static void limited(void (*set)(rlim_t), int flags) {
    char bytes[100];
    memset(bytes, 'l', sizeof bytes);
    long end = warm("limited", flags);
    set(end + 150);
    told = 0;
    CHECK(write(fd, bytes, 100) == 100 && told == 0);
    /* A part of the bytes fits. */
    CHECK(write(fd, bytes, 100) == 50 && told == 0);
    FAILS(write(fd, bytes, 100), EFBIG);
    CHECK(told == 1);
    FAILS(pwrite(fd, bytes, 100, end + 150), EFBIG);
    CHECK(told == 2);
    CHECK(lseek(fd, 0, SEEK_CUR) == end + 150 && lseek(fd, 0, SEEK_END) == end + 150);
    /* Below the limit nothing has changed. */
    if (!flags) CHECK(pwrite(fd, bytes, 100, 50) == 100);
    /* A child has the limit, too. */
    int child = fork();
    if (child == 0) {
        FAILS(write(fd, bytes, 100), EFBIG);
        CHECK(told == 3);
        _exit(0);
    }
    succeeded(child);
    set(RLIM_INFINITY);
    CHECK(write(fd, bytes, 100) == 100 && told == 2);
    CHECK(lseek(fd, 0, SEEK_END) == end + 250);
    CHECK(close(fd) == 0);
}

int main(int argc, char **argv) {
    BEGIN;
    struct sigaction action = {.sa_handler = handler};
    CHECK(sigaction(SIGXFSZ, &action, NULL) == 0);
    for (unsigned i = 0; i < sizeof ways / sizeof *ways; i++) {
        limited(ways[i], 0);
        limited(ways[i], O_APPEND);
    }
    struct rlimit limit = {1, 0};
    FAILS(setrlimit(RLIMIT_FSIZE, &limit), EINVAL);
    done("limits");
    return 0;
}
