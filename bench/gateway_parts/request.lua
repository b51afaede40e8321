-- Unique requests in turn over the given sessions.
--   wrk ... -s request.lua URL -- BODY SESSIONS SEED
-- BODY is a file with @SESSION@ in its opening and @NONCE@ in its last message; SESSIONS has a line
-- "path key" for each session, as many as there are connections.

local opening, middle, ending, sessions, seed
local count = 0

local function read(name)
  local file = assert(io.open(name, "rb"))
  local text = file:read("*a")
  file:close()
  return text
end

function init(args)
  opening, middle, ending = read(args[1]):match("^(.-)@SESSION@(.*)@NONCE@(.-)$")
  sessions = {}
  for path, key in read(args[2]):gmatch("(%S+) (%S+)\n") do
    local headers = { ["Content-Type"] = "application/json", ["Authorization"] = "Bearer " .. key }
    local number = #sessions
    sessions[number + 1] = {
      path = path,
      headers = headers,
      opening = opening .. string.format("%08d", number) .. middle,
    }
  end
  seed = args[3]
end

function request()
  local session = sessions[count % #sessions + 1]
  count = count + 1
  local nonce = seed .. string.format("%010d", count)
  return wrk.format("POST", session.path, session.headers, session.opening .. nonce .. ending)
end

function done(summary, latency)
  local errors = summary.errors
  io.write(string.format(
    "\nRESULT %d %d %.1f %.1f %d %d %d\n",
    summary.requests, summary.duration, latency:percentile(50), latency:percentile(99),
    errors.status, errors.connect + errors.read + errors.write, errors.timeout
  ))
end
