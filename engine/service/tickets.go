//go:build !sabotage_tickets

package service

// holdsTickets: what a request of Arrow Flight asks for is held to its caller's account. The build tag sabotage_tickets
// breaks this on purpose; TestFlights must then fail.
const holdsTickets = true
