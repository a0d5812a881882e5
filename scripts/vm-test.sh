#!/usr/bin/env bash
# vm-test.sh [TESTS]: the root tests of the inspector on Debian 12's own kernel and
# pure cgroup v2, in a virtual machine under software emulation (no /dev/kvm needed).
# Nightly: it takes about ten minutes. TESTS is a pattern of go test -run.
#
# The machine sees this host's files read-only, below a tmpfs that takes writes.
# Needs qemu-system-x86, busybox-static and kmod from Debian; the kernel is fetched
# into .cache/vm as a package and not installed.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/env.sh
tests=${1:-'TestProbes$|TestEveryWayOfChangingIsSeen|TestTheFileSystemAlone|TestTheCallsAlone|TestQuietTurnsAreNone|TestCopiesAreLookedAtAgain|TestVerdictLastsUntilTheNextEpoch|TestLossIsSeen|TestSandboxesDontMix|TestDeeperGroupsAreWatched|TestThisHostIsSupported|TestX32|TestSurvivor|TestSleepersAreUnchanged|TestWhoRunsIsChanged|TestWhatReachesASurvivor|TestJudgedElsewhere'}
for program in qemu-system-x86_64 busybox depmod; do
  command -v $program >/dev/null || {
    echo "vm-test: no $program: apt-get install qemu-system-x86 busybox-static kmod" >&2
    exit 1
  }
done
vm=$PWD/.cache/vm
mkdir -p "$vm/kernel"
if [ -z "$(ls "$vm"/kernel/boot/vmlinuz-* 2>/dev/null)" ]; then
  package=$(apt-cache depends linux-image-amd64 | awk '/Depends: linux-image-6/ { print $2; exit }')
  (cd "$vm" && apt-get download "$package" >/dev/null 2>&1 && dpkg -x "$package"_*.deb kernel && rm -f "$package"_*.deb)
fi
version=$(basename "$vm"/kernel/boot/vmlinuz-* | sed s/vmlinuz-//)
depmod -b "$vm/kernel" "$version"

echo "vm-test: building for Linux $version" >&2
go test -c -o "$vm/inspector.test" ./inspector
go test -c -o "$vm/bpftest.test" ./bpf/bpftest
for program in ways sleepers; do # the emulated machine's compiler takes minutes
  gcc -O1 -w -static -pthread -o "$vm/$program" "inspector/testdata/$program.c"
done
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
root=$work/root
mkdir -p "$root"/{bin,proc,sys,dev,mnt,host,write,new,modules}
cp "$(command -v busybox)" "$root/bin/busybox"
for module in virtio_pci 9pnet_virtio 9p overlay btrfs loop crc32c_generic crc32c-intel; do
  modprobe -d "$vm/kernel" -S "$version" --show-depends "$module" 2>/dev/null | awk '$1 == "insmod" { print $2 }' || true
done | awk '!seen[$0]++' | while read -r file; do
  cp "$file" "$root/modules/"
  basename "$file" >>"$root/modules/order"
done
cat >"$root/init" <<INIT
#!/bin/busybox sh
b=/bin/busybox
\$b mount -t proc proc /proc
\$b mount -t sysfs sys /sys
\$b mount -t devtmpfs dev /dev
while read -r m; do \$b insmod /modules/\$m || echo "vm-test: \$m can't be loaded"; done </modules/order
\$b mount -t tmpfs tmp /write
\$b mkdir /write/up /write/work
\$b mount -t 9p -o trans=virtio,version=9p2000.L,ro,msize=262144,cache=loose host /host || echo "vm-test: no host files"
\$b mount -t overlay -o lowerdir=/host,upperdir=/write/up,workdir=/write/work over /new
for d in proc dev; do \$b mount --move /\$d /new/\$d; done
\$b mount -t sysfs sys /new/sys
\$b mount -t cgroup2 cg /new/sys/fs/cgroup
\$b mount -t tmpfs tmp /new/tmp
\$b mkdir -p /new/dev/shm /new/dev/mqueue /new/dev/pts
\$b mount -t tmpfs tmp /new/dev/shm
\$b mount -t devpts -o ptmxmode=666 pts /new/dev/pts
\$b chroot /new /bin/bash -c '
  export PATH=$PATH HOME=/root
  ip link set lo up 2>/dev/null
  status=0
  cd $PWD/bpf/bpftest && $vm/bpftest.test -test.v || status=1
  cd $PWD/inspector && $vm/inspector.test -test.v -test.timeout ${LIMIT:-2400}s -test.run "$tests" -programs $vm || status=1
  echo "vm-test: status \$status"'
\$b poweroff -f
INIT
chmod +x "$root/init"
(cd "$root" && find . | busybox cpio -o -H newc | gzip -1) >"$work/initrd"

timeout --kill-after=10 "${LIMIT:-2400}" qemu-system-x86_64 -accel tcg,thread=multi -cpu max -smp 2 -m 4G -nographic -no-reboot \
  -nodefaults -serial stdio -kernel "$vm/kernel/boot/vmlinuz-$version" -initrd "$work/initrd" \
  -append "console=ttyS0 quiet panic=-1 cgroup_no_v1=all syscall.x32=y" \
  -virtfs local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap \
  </dev/null | stdbuf -oL tr -d '\r' | tee "$work/log"
# What that kernel hasn't got is skipped and says so; what the machine hasn't got would
# make the run worthless.
if grep -E 'test.go:[0-9]+: needs ' "$work/log"; then
  echo "vm-test: the machine lacks what the tests need" >&2
  exit 1
fi
grep -q '^vm-test: status 0$' "$work/log"
