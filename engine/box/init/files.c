// File transfers, done inside the box as its root in a process of the turn's
// cgroup, so that what they change is watched like anything else.
//
// argv says what; content comes in on stdin and goes out on stdout. A failure is
// one line "ERRNO TEXT" on stderr and status 1. Paths resolve as they do for any
// command of the box: nothing outside it can be reached.
//
//	READ_FILE  path offset limit   out: u64 size, u32 mode, bytes
//	WRITE_FILE path mode append    in: bytes
//	UNPACK     folder              in: records, end record; out: nothing
//	PACK       path                out: records, end record
//
// A record is struct record, the path, the link's target, the content.
#include "wire.h"

#include <dirent.h>
#include <sys/stat.h>
#include <time.h>

struct record {
	uint8_t type; // 'd' 'f' 'l' symlink, 'h' hard link, 'p' fifo; 0 ends
	uint8_t pad[3];
	uint32_t mode, uid, gid, path_len, link_len;
	int64_t mtime_ns;
	uint64_t size;
};

enum { PATH_LEN_MAX = 4096, BUF = 64 << 10, DEPTH_MAX = 200 };

static char buf[BUF];

static int failed(const char *what)
{
	char line[PATH_LEN_MAX + 64];
	int e = errno, n = snprintf(line, sizeof line, "%d %s", e, what);
	if (write(2, line, n < (int)sizeof line ? n : (int)sizeof line - 1) < 0)
		return 1;
	return 1;
}

static int put_all(int fd, const void *p, size_t n)
{
	for (const char *b = p; n;) {
		ssize_t k = write(fd, b, n);
		if (k < 0 && errno == EINTR)
			continue;
		if (k < 0)
			return -1;
		b += k;
		n -= k;
	}
	return 0;
}

static int get_all(int fd, void *p, size_t n)
{
	for (char *b = p; n;) {
		ssize_t k = read(fd, b, n);
		if (k < 0 && errno == EINTR)
			continue;
		if (k <= 0) {
			if (k == 0)
				errno = EPIPE; // the sender gave up
			return -1;
		}
		b += k;
		n -= k;
	}
	return 0;
}

static int read_one(char **argv)
{
	uint64_t offset = strtoull(argv[1], NULL, 10), limit = strtoull(argv[2], NULL, 10);
	struct stat st;
	int fd = open(argv[0], O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
	if (fd < 0 || fstat(fd, &st))
		return failed(argv[0]);
	if (!S_ISREG(st.st_mode)) {
		errno = S_ISDIR(st.st_mode) ? EISDIR : EINVAL;
		return failed(argv[0]);
	}
	struct __attribute__((packed)) {
		uint64_t size;
		uint32_t mode;
	} h = {st.st_size, st.st_mode & 07777};
	if (put_all(1, &h, sizeof h))
		return failed("sending");
	while (limit) {
		ssize_t n = pread(fd, buf, limit < BUF ? limit : BUF, offset);
		if (n < 0)
			return failed(argv[0]);
		if (n == 0)
			break;
		if (put_all(1, buf, n))
			return failed("sending");
		offset += n;
		limit -= n;
	}
	return 0;
}

static int write_one(char **argv)
{
	unsigned mode = strtoul(argv[1], NULL, 8);
	bool append = argv[2][0] == '1';
	struct stat st;
	int fd = open(argv[0], O_WRONLY | O_CREAT | O_CLOEXEC | O_NONBLOCK | O_NOCTTY | (append ? O_APPEND : O_TRUNC), 0600);
	if (fd < 0 || fstat(fd, &st))
		return failed(argv[0]);
	if (!S_ISREG(st.st_mode)) {
		errno = EINVAL;
		return failed(argv[0]);
	}
	for (;;) {
		ssize_t n = read(0, buf, sizeof buf);
		if (n < 0)
			return failed("receiving");
		if (n == 0)
			break;
		if (put_all(fd, buf, n))
			return failed(argv[0]);
	}
	if (mode && (st.st_mode & 07777) != mode && fchmod(fd, mode))
		return failed(argv[0]);
	return close(fd) ? failed(argv[0]) : 0;
}

// make_folders makes path's missing parents, and path itself if all is set.
static int make_folders(char *path, bool all)
{
	for (char *p = path + 1; *p; p++)
		if (*p == '/') {
			*p = 0;
			int rc = mkdir(path, 0755);
			*p = '/';
			if (rc && errno != EEXIST)
				return -1;
		}
	return all && mkdir(path, 0755) && errno != EEXIST ? -1 : 0;
}

// receive_file replaces what is there by name, so that an open file, a symlink
// or a hard link of the same name is left alone.
static int receive_file(const char *path, const struct record *r)
{
	if (unlink(path) && errno != ENOENT)
		return -1;
	int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
	if (fd < 0)
		return -1;
	for (uint64_t left = r->size; left;) {
		size_t n = left < BUF ? left : BUF;
		if (get_all(0, buf, n) || put_all(fd, buf, n))
			return -1;
		left -= n;
	}
	return close(fd);
}

static int set_attributes(const char *path, const struct record *r)
{
	struct timespec t[2] = {{.tv_nsec = UTIME_OMIT}, {r->mtime_ns / 1000000000, r->mtime_ns % 1000000000}};
	if (t[1].tv_nsec < 0)
		t[1] = (struct timespec){t[1].tv_sec - 1, t[1].tv_nsec + 1000000000};
	if (lchown(path, r->uid, r->gid) || (r->type != 'l' && chmod(path, r->mode & 07777)))
		return -1;
	return utimensat(AT_FDCWD, path, t, AT_SYMLINK_NOFOLLOW);
}

static int make_link(const char *target, const char *path)
{
	return linkat(AT_FDCWD, target, AT_FDCWD, path, 0);
}

static int unpack_one(const char *top, const struct record *r, const char *path, const char *link)
{
	char target[2 * PATH_LEN_MAX + 2];
	switch (r->type) {
	case 'd':
		if (mkdir(path, 0700)) {
			struct stat st;
			if (errno != EEXIST || stat(path, &st))
				return -1;
			if (!S_ISDIR(st.st_mode)) {
				errno = ENOTDIR;
				return -1;
			}
		}
		return set_attributes(path, r);
	case 'f':
		return receive_file(path, r) ? -1 : set_attributes(path, r);
	case 'l':
		if ((unlink(path) && errno != ENOENT) || symlink(link, path))
			return -1;
		return set_attributes(path, r);
	case 'h':
		snprintf(target, sizeof target, "%s/%s", top, link);
		return (unlink(path) && errno != ENOENT) || make_link(target, path) ? -1 : 0;
	case 'p':
		if ((unlink(path) && errno != ENOENT) || mkfifo(path, 0600))
			return -1;
		return set_attributes(path, r);
	}
	errno = EINVAL;
	return -1;
}

static int unpack(char *top)
{
	static char name[PATH_LEN_MAX + 1], link[PATH_LEN_MAX + 1], path[2 * PATH_LEN_MAX + 2];
	if (strlen(top) > PATH_LEN_MAX) {
		errno = ENAMETOOLONG;
		return failed("unpacking");
	}
	snprintf(path, sizeof path, "%s", top);
	if (make_folders(path, true))
		return failed(top);
	for (;;) {
		struct record r;
		if (get_all(0, &r, sizeof r))
			return failed("receiving");
		if (!r.type)
			return 0;
		if (r.path_len > PATH_LEN_MAX || r.link_len > PATH_LEN_MAX) {
			errno = ENAMETOOLONG;
			return failed("receiving");
		}
		if (get_all(0, name, r.path_len) || get_all(0, link, r.link_len))
			return failed("receiving");
		name[r.path_len] = link[r.link_len] = 0;
		snprintf(path, sizeof path, "%s/%s", top, name);
		if (make_folders(path, false) || unpack_one(top, &r, path, link))
			return failed(name);
	}
}

static int send_record(struct record *r, const char *path, const char *link)
{
	r->path_len = strlen(path);
	r->link_len = strlen(link);
	return put_all(1, r, sizeof *r) || put_all(1, path, r->path_len) || put_all(1, link, r->link_len);
}

// send_content sends as many bytes as were announced, whatever became of the
// file meanwhile.
static int send_content(int fd, uint64_t left)
{
	while (left) {
		ssize_t n = read(fd, buf, left < BUF ? left : BUF);
		if (n < 0)
			return -1;
		if (n == 0) {
			n = left < BUF ? left : BUF;
			memset(buf, 0, n);
		}
		if (put_all(1, buf, n))
			return -1;
		left -= n;
	}
	return 0;
}

static int pack(int dir, const char *entry, const char *name, int depth);

static int pack_folder(int fd, const char *name, int depth)
{
	char path[PATH_LEN_MAX + 1];
	DIR *d = fdopendir(fd);
	if (!d)
		return failed(name);
	int rc = 0;
	for (struct dirent *e; !rc && (e = readdir(d));) {
		if (!strcmp(e->d_name, ".") || !strcmp(e->d_name, ".."))
			continue;
		int n = snprintf(path, sizeof path, "%s/%s", name, e->d_name);
		if (n >= (int)sizeof path || depth == DEPTH_MAX) {
			errno = ENAMETOOLONG;
			rc = failed(name);
		} else {
			rc = pack(dirfd(d), e->d_name, path, depth + 1);
		}
	}
	closedir(d);
	return rc;
}

// pack sends entry of dir under its name, and what is below. What vanishes while
// it is looked at is left out, and so are sockets and devices.
static int pack(int dir, const char *entry, const char *name, int depth)
{
	char link[PATH_LEN_MAX + 1] = "";
	struct stat st;
	if (fstatat(dir, entry, &st, AT_SYMLINK_NOFOLLOW))
		return errno == ENOENT && depth ? 0 : failed(name);
	struct record r = {
		.mode = st.st_mode & 07777, .uid = st.st_uid, .gid = st.st_gid,
		.mtime_ns = (int64_t)st.st_mtim.tv_sec * 1000000000 + st.st_mtim.tv_nsec,
	};
	int fd = -1, rc;
	if (S_ISLNK(st.st_mode)) {
		ssize_t n = readlinkat(dir, entry, link, PATH_LEN_MAX);
		if (n < 0)
			return errno == ENOENT ? 0 : failed(name);
		link[n] = 0;
		r.type = 'l';
	} else if (S_ISREG(st.st_mode) || S_ISDIR(st.st_mode)) {
		fd = openat(dir, entry, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY);
		if (fd < 0 || fstat(fd, &st))
			return errno == ENOENT && depth ? 0 : failed(name);
		r.type = S_ISDIR(st.st_mode) ? 'd' : 'f';
		r.size = r.type == 'f' ? st.st_size : 0;
	} else if (S_ISFIFO(st.st_mode)) {
		r.type = 'p';
	} else {
		return 0;
	}
	if (send_record(&r, name, link))
		return failed("sending");
	if (r.type == 'd')
		return pack_folder(fd, name, depth); // closes fd
	rc = r.type == 'f' && send_content(fd, r.size) ? failed(name) : 0;
	if (fd >= 0)
		close(fd);
	return rc;
}

// pack_top follows a path that is a symlink itself, and names what it sends by
// the last part of the path ("." for "/").
static int pack_top(char *path)
{
	static char real[PATH_LEN_MAX + 1];
	char *slash;
	for (size_t n = strlen(path); n > 1 && path[n - 1] == '/'; n--)
		path[n - 1] = 0;
	if (!realpath(path, real))
		return failed(path);
	slash = strrchr(path, '/');
	const char *name = slash && slash[1] ? slash + 1 : slash ? "." : path;
	int rc = pack(AT_FDCWD, real, name, 0);
	struct record end = {0};
	return rc || put_all(1, &end, sizeof end) ? 1 : 0;
}

int file_helper(const struct command *c)
{
	static const int want[] = {[READ_FILE] = 3, [WRITE_FILE] = 3, [UNPACK] = 1, [PACK] = 1};
	if (c->argc != want[c->what]) {
		errno = EINVAL;
		return failed("arguments");
	}
	switch (c->what) {
	case READ_FILE:
		return read_one(c->argv);
	case WRITE_FILE:
		return write_one(c->argv);
	case UNPACK:
		return unpack(c->argv[0]);
	default:
		return pack_top(c->argv[0]);
	}
}
