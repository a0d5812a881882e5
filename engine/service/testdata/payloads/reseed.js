const fs = require("fs");

// Neither Math.random nor node's OpenSSL can be seeded again: what has to differ between
// children comes from the kernel.
const fresh = (size) => {
  const bytes = Buffer.alloc(size);
  const file = fs.openSync("/dev/urandom", "r");
  fs.readSync(file, bytes);
  fs.closeSync(file);
  return bytes;
};
const plain = Math.random;
Math.random = () => fresh(6).readUIntBE(0, 6) / 2 ** 48;

let taken = 0;
const step = () => {
  fs.appendFileSync("/root/drawn", `plain ${plain()}\nnode ${Math.random()}\nbytes ${fresh(8).toString("hex")}\n`);
  fs.writeFileSync("/out", `${++taken}\n`);
};
