-- What is ready in an index without whole groups: a sorted set of runs, each the number of a put and rids that it made ready,
-- ascending, at most RUN of them. All scores are 0, so runs lie in the order of their bytes: of their put, then of their first
-- rid. A row costs 16 bytes in it, and a claim reads and removes a few runs where rows of their own would be hundreds of members.
local RUN = 256

-- The run of put `head` that holds `rid` if any does, and the first rid of the next one.
local function run_of(q, head, rid)
  local top = head .. rid .. '\255'
  local found = redis.call('ZRANGE', q, '[' .. top, '[' .. head, 'BYLEX', 'REV', 'LIMIT', 0, 1)[1]
  local after = redis.call('ZRANGE', q, '(' .. top, '(' .. head .. '\255', 'BYLEX', 'LIMIT', 0, 1)[1]
  return found, after and string.sub(after, WIDTH + 1, 2 * WIDTH)
end

-- Adds rids, ascending, of a put that the queue has none of.
local function enqueue_new(q, put, rids)
  local head, set = digits(put), {}
  for j = 1, #rids, RUN do
    set[#set + 1] = 0
    set[#set + 1] = head .. table.concat(rids, '', j, math.min(j + RUN - 1, #rids))
  end
  many('ZADD', q, set)
end

-- Of rids, ascending, those with want[rid] are in the queue afterwards, the others are not.
local function enqueue_put(q, put, rids, want)
  local head, set, del, at = digits(put), {}, {}, 1
  while at <= #rids do
    local run, limit = run_of(q, head, rids[at])
    local old, out, i = run and split(string.sub(run, WIDTH + 1)) or {}, {}, 1
    while at <= #rids and (not limit or rids[at] < limit) do
      local rid = rids[at]
      while old[i] and old[i] < rid do out[#out + 1] = old[i]; i = i + 1 end
      if old[i] == rid then i = i + 1 end
      if want[rid] then out[#out + 1] = rid end
      at = at + 1
    end
    for j = i, #old do out[#out + 1] = old[j] end
    if run then del[#del + 1] = run end
    for j = 1, #out, RUN do
      set[#set + 1] = 0
      set[#set + 1] = head .. table.concat(out, '', j, math.min(j + RUN - 1, #out))
    end
  end
  many('ZREM', q, del)
  many('ZADD', q, set)
end

-- Puts rows into the queue, `add`, and takes rows out of it, `rem`: both map put -> rids. What is there, or not, is no error.
local function enqueue(q, add, rem)
  local puts = {}
  for put in pairs(add) do puts[put] = true end
  for put in pairs(rem) do puts[put] = true end
  for put in pairs(puts) do
    local rids, want, ordered = {}, {}, true
    for _, rid in ipairs(add[put] or {}) do
      if rids[#rids] and rids[#rids] > rid then ordered = false end
      rids[#rids + 1] = rid
      want[rid] = true
    end
    for _, rid in ipairs(rem[put] or {}) do
      if want[rid] == nil then rids[#rids + 1] = rid; want[rid] = false; ordered = false end
    end
    if not ordered then table.sort(rids) end
    enqueue_put(q, put, rids, want)
  end
end

local function note(by_put, put, rid)
  local rids = by_put[put]
  if rids then rids[#rids + 1] = rid else by_put[put] = { rid } end
end

-- Takes the first `least` to `most` rids out of the queue, or none. Returns them, or nil and how many there are.
local function dequeue(q, most, least)
  local out, gone, rest, from = {}, {}, nil, 0
  while #out < most and not rest do
    local runs = redis.call('ZRANGE', q, from, from + math.ceil((most - #out) / RUN) - 1)
    if #runs == 0 then break end
    from = from + #runs
    for _, run in ipairs(runs) do
      local cut = 1 + WIDTH * (1 + most - #out)
      for i = WIDTH + 1, math.min(#run, cut - 1), WIDTH do out[#out + 1] = string.sub(run, i, i + WIDTH - 1) end
      gone[#gone + 1] = run
      if #run >= cut then rest = string.sub(run, 1, WIDTH) .. string.sub(run, cut) end
      if #out == most then break end
    end
  end
  if #out == 0 or (#out < least and #out < most) then return nil, #out end
  many('ZREM', q, gone)
  if rest then redis.call('ZADD', q, 0, rest) end
  return out
end
