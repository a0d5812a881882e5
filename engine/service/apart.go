//go:build !sabotage_clients

package service

// keepsClientsApart: a client that is held to its own trees has those alone. The build tag sabotage_clients breaks this on
// purpose; TestClientsHaveWhatTheyWereGiven must then fail.
const keepsClientsApart = true
