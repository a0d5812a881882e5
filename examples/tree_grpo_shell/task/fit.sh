# shellcheck shell=bash
# fit KIND NAME: prints what is wrong with the stage in the working folder; nothing if it is fit.
# The agent's sandbox and the grader each have a copy.
fit() {
  case $1 in
  mode) [ -x "bin/$2" ] || echo "bin/$2: Permission denied" ;;
  crlf) [[ $(<"$2.conf") != *$'\r'* ]] || echo "$2.conf: a line ends in a carriage return" ;;
  link) [ -e "current/$2" ] || echo "current: broken symbolic link, $2 is not found" ;;
  lock) [ ! -e "run/$2.lock" ] || echo "run/$2.lock: held by a process that is gone" ;;
  port) [[ $(<"$2.conf") == *port=* ]] || echo "$2.conf: no value for port" ;;
  pack) [ -s "data/$2.csv" ] || echo "data/$2.csv: No such file, only an archive" ;;
  sum) sha256sum --check --status manifest 2>/dev/null || echo "manifest: the digest of $2.dat does not match" ;;
  order) sort --check=quiet index || echo "index: entry $2 is out of order" ;;
  *) echo "stage of an unknown kind" ;;
  esac
}
