//go:build sabotage_tickets

package service

const holdsTickets = false
