/* Threads and a signal handler write records one after the other through one fd. No record is lost, and there is no gap between
   two. */
#include "check.h"
#include <pthread.h>
#include <signal.h>
#include <sys/time.h>

#define SIGNALS 1000
#define RECORDS 20
#define LONG 20000

struct record {
    int who, round, number, length;
};

static int fd, handled, refused;
static volatile sig_atomic_t seen, rounds;
static pthread_barrier_t turn;
static unsigned char *file;
static volatile int over;
/* The handler sets the next timer. */
static const struct itimerval soon = {{0, 0}, {0, 200}};

static int put(int who, int number, int length) {
    unsigned char bytes[LONG];
    struct record record = {who, rounds, number, length};
    memset(bytes, who * 16 + number % 16, length);
    memcpy(bytes, &record, sizeof record);
    ssize_t count;
    do count = write(fd, bytes, length);
    while (count == -1 && errno == EINTR);
    return count == length;
}

static void handler(int signal) {
    (void)signal;
    int before = errno;
    seen++;
    if (!put(3, handled++, 48)) refused = 1;
    if (!over) setitimer(ITIMER_REAL, &soon, NULL);
    errno = before;
}

static void with_signals(int how) {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGALRM);
    CHECK(pthread_sigmask(how, &set, NULL) == 0);
}

/* Checks that the file holds this round's records up to the offset. Counts the records of each writer. */
static void look(int counts[4]) {
    long end = lseek(fd, 0, SEEK_CUR), at = 0;
    CHECK(end > 0 && pread(fd, file, end, 0) == end);
    while (at < end) {
        struct record record;
        memcpy(&record, file + at, sizeof record);
        CHECK(record.who >= 1 && record.who <= 3 && record.round == rounds && record.length <= end - at);
        if (record.who != 3 || counts[3] >= 0) CHECK(record.number == counts[record.who]++);
        for (long i = sizeof record; i < record.length; i++)
            CHECK(file[at + i] == (unsigned char)(record.who * 16 + record.number % 16));
        at += record.length;
    }
}

static void *other(void *unused) {
    with_signals(SIG_BLOCK);
    for (;;) {
        pthread_barrier_wait(&turn);
        if (over) return unused;
        for (int i = 0; i < RECORDS; i++) CHECK(put(2, i, LONG));
        pthread_barrier_wait(&turn);
    }
}

int main(int argc, char **argv) {
    BEGIN;
    file = malloc(64 << 20);
    fd = open("log", O_RDWR | O_CREAT | O_TRUNC, 0600);
    CHECK(file && fd >= 0);
    struct sigaction action = {.sa_handler = handler};
    CHECK(sigaction(SIGALRM, &action, NULL) == 0);

    for (int i = 0; i < 200; i++) CHECK(put(1, i, 10000));
    /* The handler interrupts writes and seeks. If it interrupts the seek to 0, its record may lie at the offset from before the seek,
       so this does not count the handler's records. */
    CHECK(setitimer(ITIMER_REAL, &soon, NULL) == 0);
    while (seen < SIGNALS) {
        CHECK(lseek(fd, 0, SEEK_SET) == 0);
        for (int i = 0; i < 8 * RECORDS; i++) CHECK(put(1, i, 64 + i));
        with_signals(SIG_BLOCK);
        int counts[4] = {0, 0, 0, -1};
        look(counts);
        CHECK(counts[1] == 8 * RECORDS);
        rounds++;
        with_signals(SIG_UNBLOCK);
    }
    with_signals(SIG_BLOCK);
    done("handler");

    /* The same beside another thread, for which the interrupted thread often waits. */
    pthread_t thread;
    CHECK(pthread_barrier_init(&turn, NULL, 2) == 0);
    CHECK(pthread_create(&thread, NULL, other, NULL) == 0);
    for (seen = 0; seen < SIGNALS; rounds++) {
        CHECK(lseek(fd, 0, SEEK_SET) == 0);
        handled = 0;
        pthread_barrier_wait(&turn);
        with_signals(SIG_UNBLOCK);
        for (int i = 0; i < RECORDS; i++) CHECK(put(1, i, 100));
        with_signals(SIG_BLOCK);
        pthread_barrier_wait(&turn);
        int counts[4] = {0};
        look(counts);
        CHECK(counts[1] == RECORDS && counts[2] == RECORDS && counts[3] == handled);
    }
    over = 1;
    pthread_barrier_wait(&turn);
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK(!refused);
    done("threads");
    return 0;
}
