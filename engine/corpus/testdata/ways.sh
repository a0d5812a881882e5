# Ways of changing something, and of changing nothing, as shell commands do it.
# The names and options are those of ways.c; what no command can do is left out.
# Descriptor 9 is old, 8 is big.
held=
open() { [ -n "$held" ] || exec 9<>old 8<>big; }
way() {
	case $1 in
	write_) open; printf hello >&9 ;;
	append) echo x >>old ;;
	write_child) open; (cat other >&9) ;;
	stdout_) open; (exec >&9; echo hello) ;;
	proc_self_fd) open; echo hello >/proc/self/fd/9 ;;
	write_many) open; for i in 1 2 3 4 5 6 7 8; do printf zzzz; done >&8 ;;
	dd_notrunc) dd if=other of=old bs=100 count=1 conv=notrunc 2>/dev/null ;;
	dd_direct) dd if=/dev/zero of=old bs=4096 count=1 conv=notrunc oflag=direct 2>/dev/null ;;
	copy) cp other old ;;
	ficlone) cp --reflink=always other old ;;
	truncate_) truncate -s 0 old ;;
	truncate_grow) truncate -s 1M old ;;
	o_trunc) : >old ;;
	o_trunc_empty) : >empty ;;
	double_fork) open; ((echo hello >&9) & wait) ;;
	concurrent) for c in 1 2 3 4; do (echo "$c" >>old) & done; wait ;;
	sparse) truncate -s 4M old; echo s >>old ;;
	sed_i) sed -i s/a/b/ old ;;
	create) : >new ;;
	rename_) mv old new ;;
	rename_over) : >t; mv t old ;;
	rename_dir) mv d d2 ;;
	rename_into) mv old e/old ;;
	link_) ln old new ;;
	symlink_) ln -s old new ;;
	mkfifo_) mkfifo new ;;
	mkdir_) mkdir new ;;
	rmdir_) rmdir e ;;
	unlink_) rm old ;;
	tree_) rm -r d; mkdir d ;;
	chmod_) chmod 600 old ;;
	chmod_dir) chmod 700 d ;;
	chown_) chown 5:5 old ;;
	touch) touch -c old ;;
	utimensat_) touch -d @1 old ;;
	utimensat_dir) touch -d @1 d ;;
	long_name) : >"$(printf 'n%.0s' {1..200})"$'\n\xff' ;;
	hostname) hostname x ;;
	mount_) mount -t tmpfs t e ;;
	bind_mount) mount --bind d e ;;
	sysctl) echo y >/proc/sys/kernel/hostname ;;
	limits_of_1) prlimit -p 1 --msgqueue=4096 ;;
	nice_of_1) renice -n 5 -p 1 ;;
	survivor) sleep 1000 </dev/null >/dev/null 2>&1 & ;;
	quiet) : ;;
	reads) cat old other >/dev/null; ls -lR . >/dev/null; stat old >/dev/null ;;
	open_rdwr) open ;;
	create_unlink) echo x >t; rm t ;;
	mkdtemp_) t=$(mktemp -d ./tXXXXXX); echo x >"$t/a"; chmod 644 "$t/a"; rm -r "$t" ;;
	rename_new) : >a; mv a b; mv b a; rm a ;;
	rename_back) mv old t; mv t old ;;
	link_unlink) ln old t; rm t ;;
	heredoc) cat <<-X >/dev/null
		some lines
		X
		;;
	pipes) cat old | sort | uniq | wc >/dev/null ;;
	failed) mkdir d; rmdir d; cat none; mv none x; : >none/x ;;
	children) for i in 1 2 3; do (:) & done; wait ;;
	own_limits) (ulimit -n 64; umask 077; cd d) ;;
	fsyncs) sync old ;;
	*) echo "no way $1" >&2; exit 2 ;;
	esac
}

case ${1-} in
-i) open; held=1; shift; (for w in "$@"; do way "$w"; done) ;;
-s)
	open
	held=1
	exec 5<>req 6<>ack
	# Kept: old, big and the two fifos.
	(while read -r n <&5; do way "$n"; echo k >&6; done) </dev/null >/dev/null 2>&1 &
	;;
-S)
	shift
	for w in "$@"; do echo "$w" >req; read -r _ <ack; done
	;;
*) for w in "$@"; do way "$w"; done ;;
esac
