//go:build sabotage_clients

package service

const keepsClientsApart = false
