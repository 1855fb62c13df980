/* Dies in the middle of a write that extends a file: the write's buffer has two pages, and only the first is readable. */
#include <string.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

int main(int argc, char **argv)
{
	if (argc != 2)
		return 2;
	char *pages = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (pages == MAP_FAILED)
		return 5;
	memset(pages, 'X', 8192);
	if (mprotect(pages + 4096, 4096, PROT_NONE) != 0)
		return 6;
	char bytes[1000];
	memset(bytes, 'a', sizeof bytes);
	/* A write whose pages are not reserved yet goes through the kernel, which fails with EFAULT or writes the readable bytes. */
	for (int try = 0; try < 1000; try++) {
		unlink(argv[1]);
		int fd = open(argv[1], O_RDWR | O_CREAT | O_EXCL, 0644);
		if (fd < 0)
			return 3;
		for (int n = 0; n < 100; n++)
			if (write(fd, bytes, sizeof bytes) != sizeof bytes)
				return 4;
		if (pwrite(fd, pages, 8192, 100000) == 8192)
			return 8;
		close(fd);
	}
	return 9;
}
