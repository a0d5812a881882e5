// Package corpus measures the inspector: random programs run as turns of real
// sandboxes, and the verdict of each half is compared with what an oracle finds,
// which shares no code with the inspector or the captures.
//
// It holds tests alone. TestCorpus prints a table of how often each way of
// changing something was tried, per language and origin of the descriptor, and
// how often it was missed; `make corpus N=2000` is the longer form.
package corpus
