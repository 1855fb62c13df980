/* All holders of a description use one offset, however they got it. Usage: DIR READ_FROM STATIC_READ_FROM; the last two are
   programs. */
#include "check.h"
#include <pthread.h>
#include <pty.h>
#include <sched.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <wordexp.h>

extern char **environ;
pid_t _Fork(void);
pid_t __fork(void);
int __dup2(int, int);
int __fcntl(int, int, ...);

static const char *reader, *static_reader;
static char number[16], offset[16];
/* A fresh description each time, because sharing may be permanent. */
static int fd;
static long next;

static void fresh(void) {
    if (fd > 0) CHECK(close(fd) == 0);
    fd = open("data", O_RDWR);
    CHECK(fd > 2);
    next = 0;
}

/* Reads the next ten bytes of the description through the fd `with`, and counts them. */
static void here(int with) {
    NEXT_ARE_FROM(with, next);
    next += 10;
}

/* The arguments of a child. */
static void tell(void) {
    snprintf(number, sizeof number, "%d", fd);
    snprintf(offset, sizeof offset, "%ld", next);
}

static void duplicates(void) {
    fresh();
    here(fd);
    int copies[] = {
        SUCCEEDS(dup(fd)),
        SUCCEEDS(dup2(fd, 200)),
        SUCCEEDS(dup3(fd, 201, O_CLOEXEC)),
        SUCCEEDS(__dup2(fd, 202)),
        SUCCEEDS(fcntl(fd, F_DUPFD, 210)),
        SUCCEEDS(fcntl64(fd, F_DUPFD_CLOEXEC, 210)),
        SUCCEEDS(__fcntl(fd, F_DUPFD, 210)),
        SUCCEEDS((int)syscall(SYS_dup, fd)),
    };
    int count = sizeof copies / sizeof *copies;
    for (int round = 0; round < 3; round++)
        for (int i = 0; i < count; i++) {
            here(copies[i]);
            here(fd);
        }
    CHECK(SUCCEEDS(lseek(copies[1], 5, SEEK_SET)) == 5);
    next = 5;
    here(copies[4]);
    /* The original is closed, the copies stay. */
    CHECK(close(fd) == 0);
    here(copies[3]);
    for (int i = 0; i < count; i++) {
        here(copies[i]);
        if (copies[i] != fd) CHECK(close(copies[i]) == 0);
    }
    /* Before any read. */
    fd = open("data", O_RDONLY);
    next = 0;
    int copy = SUCCEEDS(dup(fd));
    here(copy);
    here(fd);
    CHECK(close(copy) == 0);
    here(fd);
    FAILS(dup2(fd, -1), EBADF);
    FAILS(dup2(99, fd), EBADF);
    CHECK(SUCCEEDS(dup2(fd, fd)) == fd);
    FAILS(dup3(fd, fd, 0), EINVAL);
    here(fd);
    done("duplicates");
}

static void over_another(void) {
    /* dup2 closes the fd's earlier file. */
    fill("other", 5000);
    int other = open("other", O_RDWR);
    CHECK(pwrite(other, "XXXXXXXXXX", 10, 0) == 10);
    char ten[10];
    CHECK(read(other, ten, 10) == 10 && memcmp(ten, "XXXXXXXXXX", 10) == 0);
    fresh();
    here(fd);
    CHECK(dup2(fd, other) == other);
    here(other);
    here(fd);
    CHECK(close(other) == 0);
    here(fd);
    done("over another");
}

static int child(void *unused) {
    (void)unused;
    here(fd);
    _exit(0);
}

static void children(void) {
    pid_t (*forks[])(void) = {fork, __fork, _Fork};
    for (int i = 0; i < 3; i++) {
        fresh();
        here(fd);
        pid_t pid = forks[i]();
        if (pid == 0) {
            here(fd);
            here(fd);
            _exit(0);
        }
        succeeded(pid);
        next += 20;
        here(fd);
        /* The reverse: an fd that the child opens is its own. */
        pid = forks[i]();
        if (pid == 0) {
            fresh();
            here(fd);
            CHECK(pwrite(fd, "0123456789", 10, 90000) == 10);
            _exit(0);
        }
        succeeded(pid);
        here(fd);
        char ten[10];
        CHECK(pread(fd, ten, 10, 90000) == 10 && memcmp(ten, "0123456789", 10) == 0);
        for (int j = 0; j < 10; j++) ten[j] = at(90000 + j);
        CHECK(pwrite(fd, ten, 10, 90000) == 10);
    }
    /* Both continue, the child after the parent. */
    fresh();
    here(fd);
    int go[2];
    CHECK(pipe(go) == 0);
    pid_t pid = fork();
    if (pid == 0) {
        char c;
        CHECK(read(go[0], &c, 1) == 1);
        next += 20;
        here(fd);
        _exit(0);
    }
    here(fd);
    here(fd);
    CHECK(write(go[1], "x", 1) == 1);
    succeeded(pid);
    next += 10;
    here(fd);
    CHECK(close(go[0]) == 0 && close(go[1]) == 0);

    fresh();
    here(fd);
    static char stack[65536] __attribute__((aligned(16)));
    pid = clone(child, stack + sizeof stack, SIGCHLD, NULL);
    succeeded(pid);
    next += 10;
    here(fd);

    fresh();
    here(fd);
    int master;
    pid = forkpty(&master, NULL, NULL, NULL);
    if (pid == 0) {
        here(fd);
        _exit(0);
    }
    succeeded(pid);
    CHECK(close(master) == 0);
    next += 10;
    here(fd);

    fresh();
    here(fd);
    pid = syscall(SYS_clone, SIGCHLD, NULL, NULL, NULL, NULL);
    if (pid == 0) {
        here(fd);
        _exit(0);
    }
    succeeded(pid);
    next += 10;
    here(fd);
    done("children");
}

/* Creates a child as shells and interpreters do. */
#define EXECUTED(name, make, call)                                                                 \
    do {                                                                                           \
        fresh();                                                                                   \
        here(fd);                                                                                  \
        tell();                                                                                    \
        pid_t pid = make();                                                                        \
        if (pid == 0) {                                                                            \
            call;                                                                                  \
            _exit(1);                                                                              \
        }                                                                                          \
        succeeded(pid);                                                                            \
        next += 10;                                                                                \
        here(fd);                                                                                  \
    } while (0)

static void programs(void) {
    const char *binaries[] = {reader, static_reader};
    for (int i = 0; i < 2; i++) {
        const char *program = binaries[i];
        char *arguments[] = {(char *)program, number, offset, NULL};
        EXECUTED("execv", fork, execv(program, arguments));
        EXECUTED("execve", vfork, execve(program, arguments, environ));
        EXECUTED("execvp", vfork, execvp(program, arguments));
        EXECUTED("execvpe", vfork, execvpe(program, arguments, environ));
        EXECUTED("execl", vfork, execl(program, program, number, offset, NULL));
        EXECUTED("execlp", fork, execlp(program, program, number, offset, NULL));
        EXECUTED("execle", fork, execle(program, program, number, offset, NULL, environ));
        EXECUTED("fexecve", fork, fexecve(open(program, O_RDONLY), arguments, environ));
        EXECUTED("execveat", fork, execveat(AT_FDCWD, program, arguments, environ, 0));
        EXECUTED("syscall", fork, syscall(SYS_execve, program, arguments, environ));
        /* The child rearranges its fds before it executes, as a shell does. */
        EXECUTED("moves", vfork, {
            dup2(fd, 150);
            close(fd);
            dup2(150, fd);
            close(150);
            execv(program, arguments);
        });
        /* A child whose program does not exist continues. */
        EXECUTED("fails", fork, {
            CHECK(execl("./missing", "missing", NULL) == -1 && errno == ENOENT);
            here(fd);
            _exit(0);
        });

        pid_t pid;
        fresh();
        here(fd);
        tell();
        CHECK(posix_spawn(&pid, program, NULL, NULL, arguments, environ) == 0);
        succeeded(pid);
        next += 10;
        here(fd);
        tell();
        CHECK(posix_spawnp(&pid, program, NULL, NULL, arguments, environ) == 0);
        succeeded(pid);
        next += 10;
        here(fd);
        CHECK(posix_spawn(&pid, "./missing", NULL, NULL, arguments, environ) == ENOENT);

        char line[4096];
        fresh();
        here(fd);
        tell();
        snprintf(line, sizeof line, "%s %s %s", program, number, offset);
        CHECK(system(line) == 0);
        next += 10;
        here(fd);

        fresh();
        here(fd);
        tell();
        snprintf(line, sizeof line, "%s %s %s", program, number, offset);
        FILE *pipe = popen(line, "r");
        CHECK(pipe && pclose(pipe) == 0);
        next += 10;
        here(fd);

        fresh();
        here(fd);
        tell();
        snprintf(line, sizeof line, "$(%s %s %s)", program, number, offset);
        wordexp_t words;
        CHECK(wordexp(line, &words, 0) == 0);
        wordfree(&words);
        next += 10;
        here(fd);
    }
    /* More arguments than there are registers. */
    pid_t pid = fork();
    if (pid == 0) {
        execlp("sh", "sh", "-c", "test \"$*\" = 'a b c d e f g h i j k l'", "0", "a", "b", "c", "d", "e",
               "f", "g", "h", "i", "j", "k", "l", NULL);
        _exit(1);
    }
    succeeded(pid);
    char *alone[] = {"JERICHO_TEST_ALONE=1", NULL};
    pid = fork();
    if (pid == 0) {
        execle("/bin/sh", "sh", "-c", "test \"$JERICHO_TEST_ALONE$1$2$3$4$5\" = 1abcde", "0", "a", "b", "c", "d",
               "e", NULL, alone);
        _exit(1);
    }
    succeeded(pid);
    done("programs");
}

static void sockets(void) {
    fresh();
    here(fd);
    int ends[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) fd = -1; /* it must come by message */
    char control[CMSG_SPACE(sizeof(int))] = {0};
    char byte = 'x';
    struct iovec part = {&byte, 1};
    struct msghdr message = {
        .msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    if (pid == 0) {
        for (int i = 0; i < 2; i++) {
            struct mmsghdr several = {message, 0};
            if (i == 0) {
                CHECK(recvmsg(ends[1], &several.msg_hdr, 0) == 1);
            } else {
                CHECK(recvmmsg(ends[1], &several, 1, 0, NULL) == 1);
            }
            struct cmsghdr *header = CMSG_FIRSTHDR(&several.msg_hdr);
            CHECK(header && header->cmsg_type == SCM_RIGHTS);
            memcpy(&fd, CMSG_DATA(header), sizeof fd);
            next = i == 0 ? 20 : 40;
            here(fd);
            CHECK(write(ends[1], "y", 1) == 1);
        }
        _exit(0);
    }
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof fd);
    /* Opened after the fork: no other process has it until it is sent. */
    fresh();
    here(fd);
    here(fd);
    memcpy(CMSG_DATA(header), &fd, sizeof fd);
    CHECK(sendmsg(ends[0], &message, 0) == 1);
    CHECK(read(ends[0], &byte, 1) == 1);
    next += 10;
    here(fd);
    fresh();
    for (int i = 0; i < 4; i++) here(fd);
    memcpy(CMSG_DATA(header), &fd, sizeof fd);
    struct mmsghdr several = {message, 0};
    CHECK(sendmmsg(ends[0], &several, 1, 0) == 1);
    CHECK(read(ends[0], &byte, 1) == 1);
    next += 10;
    here(fd);
    succeeded(pid);
    CHECK(close(ends[0]) == 0 && close(ends[1]) == 0);
    done("sockets");
}

static void background(void) {
    fresh();
    here(fd);
    int result[2];
    CHECK(pipe(result) == 0);
    pid_t pid = fork();
    if (pid == 0) {
        CHECK(daemon(1, 0) == 0);
        /* The child's output is invisible, because 0 to 2 are /dev/null now: it answers through the pipe. */
        char nothing, *answer = "n";
        unsigned char ten[10];
        if (read(fd, ten, 10) == 10 && is_from(ten, 10, next) && read(0, &nothing, 1) == 0 &&
            write(1, "x", 1) == 1)
            answer = "y";
        CHECK(write(result[1], answer, 1) == 1);
        _exit(0);
    }
    succeeded(pid);
    char answer;
    CHECK(read(result[0], &answer, 1) == 1 && answer == 'y');
    next += 10;
    here(fd);
    CHECK(close(result[0]) == 0 && close(result[1]) == 0);
    done("background");
}

int main(int argc, char **argv) {
    BEGIN;
    CHECK(argc == 4);
    reader = argv[2];
    static_reader = argv[3];
    fill("data", 100000);
    duplicates();
    over_another();
    children();
    programs();
    sockets();
    background();
    return 0;
}
