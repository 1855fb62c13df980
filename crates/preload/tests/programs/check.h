/* Shared by the programs. Each checks itself, and prints its steps on standard output. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            int why = errno;                                                                       \
            fprintf(stderr, "%s:%d: not true: %s (errno %d)\n", __FILE__, __LINE__, #condition, why); \
            _exit(1);                                                                              \
        }                                                                                          \
    } while (0)

/* A call that succeeds leaves errno unchanged. */
#define UNTOUCHED 12345
#define SUCCEEDS(call)                                                                             \
    ({                                                                                             \
        errno = UNTOUCHED;                                                                         \
        __auto_type answer = (call);                                                               \
        CHECK(answer >= 0);                                                                        \
        CHECK(errno == UNTOUCHED);                                                                 \
        answer;                                                                                    \
    })
/* A call that fails returns -1 and sets errno. */
#define FAILS(call, with)                                                                          \
    do {                                                                                           \
        errno = UNTOUCHED;                                                                         \
        CHECK((call) == -1);                                                                       \
        CHECK(errno == (with));                                                                    \
    } while (0)

/* Returns byte `i` of every file that `fill` makes. */
static inline unsigned char at(long i) { return (unsigned char)(i * 31 + i / 251); }

static inline int is_from(const void *bytes, long count, long offset) {
    for (long i = 0; i < count; i++)
        if (((const unsigned char *)bytes)[i] != at(offset + i)) return 0;
    return 1;
}

/* Makes a file of `bytes` bytes. */
static inline void fill(const char *name, long bytes) {
    unsigned char *data = malloc(bytes);
    CHECK(data);
    for (long i = 0; i < bytes; i++) data[i] = at(i);
    int fd = open(name, O_WRONLY | O_CREAT | O_TRUNC, 0644);
    CHECK(fd >= 0);
    CHECK(write(fd, data, bytes) == bytes);
    CHECK(close(fd) == 0);
    free(data);
}

/* Checks that the next 10 bytes of an fd are those at `offset`. */
#define NEXT_ARE_FROM(fd, offset)                                                                  \
    do {                                                                                           \
        unsigned char bytes_[10];                                                                   \
        CHECK(read(fd, bytes_, 10) == 10);                                         \
        CHECK(is_from(bytes_, 10, offset));                                                 \
    } while (0)

static inline void succeeded(int pid) {
    int status;
    CHECK(pid > 0);
    CHECK(waitpid(pid, &status, 0) == pid);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static inline void done(const char *what) {
    printf("%s\n", what);
    fflush(stdout);
}

/* Begins every program: its argument is the directory to work in. */
#define BEGIN                                                                                      \
    CHECK(argc > 1);                                                                               \
    CHECK(chdir(argv[1]) == 0)
